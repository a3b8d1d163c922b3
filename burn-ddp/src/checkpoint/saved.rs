//! The checkpoints that a folder has: what one is, and which is the best.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use burn::tensor::Bytes;
use serde::{Deserialize, Serialize};

use super::{Checkpoints, DESCRIPTION, PREFIX, REPLACED, if_there};
use crate::DdpError;

/// Whether the best metric is the lowest or the highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Best {
    /// The lowest, as for a loss.
    Lowest,
    /// The highest, as for an accuracy.
    Highest,
}

/// A checkpoint on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The step after which it was saved.
    pub step: u64,
    /// The metric by which checkpoints are compared. `None` if there is none, or it was not finite.
    pub metric: Option<f64>,
    /// Its number among the checkpoints that were written to its folder, from 1: the highest is the
    /// [latest](Checkpoints::latest). 0 if the description does not contain a number.
    #[serde(default)]
    pub number: u64,
    /// The folder with the program's files.
    #[serde(skip)]
    pub folder: PathBuf,
}

impl Checkpoint {
    /// A file of the checkpoint, in memory. Load optimizers from it: from a file by name, Burn reads a state when its parameter
    /// first has a gradient, and by then rank 0 may have removed the checkpoint.
    ///
    /// ```
    /// use burn::optim::AdamConfig;
    /// use burn_ddp::{Checkpoints, ProcessGroup};
    /// use std::io;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path();
    /// let checkpoints = Checkpoints::new(path, &ProcessGroup::single())?;
    /// let optimizer = AdamConfig::new().init();
    /// checkpoints.save(1, None, |folder| optimizer.save(folder.join("optimizer.bpk")).map_err(io::Error::other))?;
    /// if let Some(last) = checkpoints.latest()? {
    ///     let resumed = AdamConfig::new().init().from_bytes(last.read("optimizer.bpk")?)?;
    ///     # let _ = resumed;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`DdpError::Checkpoint`] when the file cannot be read.
    pub fn read(&self, file: impl AsRef<Path>) -> Result<Bytes, DdpError> {
        let path = self.folder.join(file);
        match fs::read(&path) {
            Ok(bytes) => Ok(Bytes::from_bytes_vec(bytes)),
            Err(error) => Err(DdpError::Checkpoint {
                path,
                problem: error.to_string(),
            }),
        }
    }
}

impl Checkpoints {
    /// All checkpoints, in the order in which they were written.
    pub(super) fn list(&self) -> io::Result<Vec<Checkpoint>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            // The folder may contain other files.
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let replaced = name.strip_prefix(REPLACED);
            let step = replaced.unwrap_or(&name);
            let step = step.strip_prefix(PREFIX).unwrap_or_default();
            if step.is_empty() || step.bytes().any(|byte| !byte.is_ascii_digit()) {
                continue;
            }
            if replaced.is_some_and(|name| self.folder.join(name).exists()) {
                continue;
            }
            match if_there(describe(entry.path())) {
                // Without a description, it is not one of our checkpoints.
                Ok(checkpoint) => all.extend(checkpoint),
                Err(error) => {
                    let folder = entry.path();
                    log::warn!("burn-ddp: {} is no checkpoint: {error}", folder.display());
                }
            }
        }
        all.sort_by_key(|checkpoint| (checkpoint.number, checkpoint.step));
        Ok(all)
    }
}

/// Reads the description of the checkpoint in a folder.
fn describe(folder: PathBuf) -> io::Result<Checkpoint> {
    let text = fs::read(folder.join(DESCRIPTION))?;
    let checkpoint: Checkpoint = serde_json::from_slice(&text)?;
    Ok(Checkpoint {
        folder,
        ..checkpoint
    })
}

/// The best of the checkpoints that have a metric other than NaN; of equal ones, the last written.
pub(super) fn choose(all: &[Checkpoint], best: Best) -> Option<&Checkpoint> {
    let comparable = all
        .iter()
        .filter_map(|it| Some((it, it.metric.filter(|metric| !metric.is_nan())?)));
    let value = |metric: f64| match best {
        Best::Highest => metric,
        Best::Lowest => -metric,
    };
    comparable
        .max_by(|a, b| value(a.1).total_cmp(&value(b.1)))
        .map(|(checkpoint, _)| checkpoint)
}
