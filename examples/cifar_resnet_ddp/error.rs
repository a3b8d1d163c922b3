//! The errors of a run.

use std::io;
use std::path::PathBuf;

use burn::tensor::TensorReadError;
use burn_amp::{LayerError, LossScalerError};
use burn_ddp::{DdpError, ProcessGroup};
use burn_fp8::Fp8Error;
use examples::device::DeviceError;
use examples::images::DataError;
use examples::metrics::MetricsError;
use examples::plot::PlotError;
use serde_json::Value;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(
        "a step of {images} images over {ranks} rank(s) is more than the {train_images} there are: choose a smaller --batch-size"
    )]
    BatchTooLarge {
        images: usize,
        ranks: usize,
        train_images: usize,
    },
    #[error("cannot write to {}: {source}", .path.display())]
    Output { path: PathBuf, source: io::Error },
    #[error("nothing to resume: there is no folder {}", .0.display())]
    NothingToResume(PathBuf),
    #[error(
        "{} was made with {name} {checkpoint}, this run has {run}: resume with the options of that run",
        .path.display()
    )]
    OtherSettings {
        path: PathBuf,
        name: String,
        checkpoint: Value,
        run: Value,
    },
    /// The folder of checkpoints cannot be used.
    #[error(transparent)]
    Checkpoint(DdpError),
    #[error("cannot go on from {}: {problem}", .path.display())]
    Unreadable { path: PathBuf, problem: String },
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The ranks could not share the amaxes of fp8 layers.
    #[error(transparent)]
    Amaxes(Box<dyn std::error::Error + Send + Sync>),
    /// The device could not execute an op, for instance because it ran out of memory.
    #[error("the device failed: {0}")]
    Read(#[from] TensorReadError),
    #[error(transparent)]
    LossScaler(#[from] LossScalerError),
    #[error(transparent)]
    Fp8(#[from] Fp8Error),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error(transparent)]
    Plot(#[from] PlotError),
    #[error(transparent)]
    Ranks(#[from] DdpError),
    /// An error on one of several ranks.
    #[error("rank {rank}: {source}")]
    OnRank { rank: usize, source: Box<Error> },
    /// A rank that this process started has printed its error, and ended with this exit code.
    #[error("a rank ended with exit code {0}")]
    Said(u8),
}

impl Error {
    /// Adds the number of this rank, if there are several, and ends the run on all ranks.
    pub(crate) fn on(self, group: &ProcessGroup) -> Self {
        if group.world_size() == 1 {
            return self;
        }
        if !matches!(self, Self::Ranks(_)) {
            group.abort(self.to_string());
        }
        Self::OnRank {
            rank: group.rank(),
            source: Box::new(self),
        }
    }

    /// Prints the error in one line, unless a rank has already done so.
    pub(crate) fn say(&self) {
        if !matches!(self, Self::Said(_)) {
            eprintln!("error: {self}");
        }
    }

    /// 2 if the run could not be set up as requested, 1 if it failed.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Data(_)
            | Self::Device(_)
            | Self::BatchTooLarge { .. }
            | Self::Output { .. }
            | Self::NothingToResume(_)
            | Self::OtherSettings { .. }
            | Self::Checkpoint(_)
            | Self::Unreadable { .. }
            | Self::Layer(_)
            | Self::LossScaler(_)
            | Self::Fp8(_) => 2,
            Self::Ranks(error) if error.is_setup() => 2,
            Self::Amaxes(_) | Self::Read(_) | Self::Metrics(_) | Self::Plot(_) | Self::Ranks(_) => {
                1
            }
            Self::OnRank { source, .. } => source.exit_code(),
            Self::Said(code) => *code,
        }
    }
}
