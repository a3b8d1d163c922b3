//! What can end a run.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use examples::checkpoint::CheckpointError;
use examples::images::DataError;
use examples::metrics::MetricsError;
use examples::plot::PlotError;
use serde_json::Value;
use thiserror::Error;

use crate::cli::DeviceKind;

#[derive(Debug, Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(
        "device `{0}` is not compiled in: run `cargo run --release --features {0} --example cifar_resnet_ddp -- --device {0}`"
    )]
    NotCompiledIn(DeviceKind),
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
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error(transparent)]
    Plot(#[from] PlotError),
}

impl Error {
    /// 2 when the run could not be set up as asked for, 1 when it failed.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Metrics(_) | Self::Plot(_) => ExitCode::from(1),
            Self::Data(_)
            | Self::NotCompiledIn(_)
            | Self::BatchTooLarge { .. }
            | Self::Output { .. }
            | Self::NothingToResume(_)
            | Self::OtherSettings { .. }
            | Self::Checkpoint(_) => ExitCode::from(2),
        }
    }
}
