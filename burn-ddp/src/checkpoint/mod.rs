//! Checkpoints: written by rank 0, all or nothing, and found again by all ranks alike.

mod states;

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{DdpError, ProcessGroup};

/// The file that describes a checkpoint, beside what the program wrote.
const DESCRIPTION: &str = "checkpoint.json";
const PREFIX: &str = "step-";
const UNFINISHED: &str = ".unfinished-";
/// Before the name of a checkpoint whose step is being saved again.
const REPLACED: &str = ".replaced-";

/// Which metric is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Best {
    /// The lowest: a loss.
    Lowest,
    /// The highest: an accuracy.
    Highest,
}

/// A checkpoint on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The step after which it was made.
    pub step: u64,
    /// The metric by which checkpoints are compared.
    pub metric: Option<f64>,
    /// The folder with the program's files.
    #[serde(skip)]
    pub folder: PathBuf,
}

/// A folder of checkpoints, each a folder of its own.
///
/// A checkpoint is written under another name, flushed to the disk and renamed: at any moment, what
/// is there is whole. What an interrupted run left unfinished is removed.
///
/// ```
/// use burn_ddp::{Best, Checkpoints, ProcessGroup};
/// use std::fs;
///
/// # fn main() -> Result<(), burn_ddp::DdpError> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path();
/// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?
/// let checkpoints = Checkpoints::new(path, &group)?.keep_last(2).keep_best(Best::Highest);
/// for step in 1..=5 {
///     checkpoints.save(step, Some(0.5), |folder| fs::write(folder.join("model"), "weights"))?;
/// }
/// let last = checkpoints.latest()?.unwrap();
/// assert_eq!(last.step, 5);
/// assert_eq!(fs::read_to_string(last.folder.join("model")).unwrap(), "weights");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Checkpoints {
    folder: PathBuf,
    group: ProcessGroup,
    keep_last: Option<usize>,
    keep_best: Option<Best>,
}

impl Checkpoints {
    /// Opens a folder of checkpoints, which is made if it does not exist. All ranks call this.
    ///
    /// # Errors
    ///
    /// [`DdpError::Checkpoint`], on all ranks, when rank 0 cannot use the folder; or a fault of the
    /// group.
    pub fn new(folder: impl Into<PathBuf>, group: &ProcessGroup) -> Result<Self, DdpError> {
        let checkpoints = Self {
            folder: folder.into(),
            group: group.clone(),
            keep_last: None,
            keep_best: None,
        };
        checkpoints.on_main(|| {
            let folder = &checkpoints.folder;
            fs::create_dir_all(folder)?;
            for entry in fs::read_dir(folder)? {
                let entry = entry?;
                let name = entry.file_name();
                let name = name.to_string_lossy();
                match name.strip_prefix(REPLACED).map(|step| folder.join(step)) {
                    // The new one had not come to its place.
                    Some(step) if !step.exists() => fs::rename(entry.path(), step)?,
                    Some(_) => fs::remove_dir_all(entry.path())?,
                    None if name.starts_with(UNFINISHED) => fs::remove_dir_all(entry.path())?,
                    None => {}
                }
            }
            Ok(())
        })?;
        Ok(checkpoints)
    }

    /// Keeps only the last `count` checkpoints (at least one). Default: all.
    pub fn keep_last(mut self, count: usize) -> Self {
        self.keep_last = Some(count.max(1));
        self
    }

    /// Keeps the checkpoint with the best metric as well, however old it is.
    pub fn keep_best(mut self, best: Best) -> Self {
        self.keep_best = Some(best);
        self
    }

    /// Saves a checkpoint: `write` gets a folder to write files to, on rank 0. All ranks call this, and
    /// none returns before the checkpoint is safe on the disk.
    ///
    /// Read the model's state after [`Module::valid`](burn::module::Module::valid) was called: running
    /// statistics keep their last update back until then, and a record would miss it.
    ///
    /// # Errors
    ///
    /// [`DdpError::Checkpoint`], on all ranks, when it could not be written (earlier checkpoints are as
    /// they were); or a fault of the group.
    pub fn save(
        &self,
        step: u64,
        metric: Option<f64>,
        write: impl FnOnce(&Path) -> io::Result<()>,
    ) -> Result<(), DdpError> {
        self.on_main(|| {
            let unfinished = self.folder.join(format!("{UNFINISHED}{step}"));
            let result = self.write(&unfinished, step, metric, write);
            if result.is_err() {
                // The error that matters is the first; `new` will try to remove it again.
                let _ = fs::remove_dir_all(&unfinished);
            }
            result?;
            self.prune()
        })
    }

    /// The last checkpoint, the same for all ranks. All ranks call this.
    ///
    /// # Errors
    ///
    /// [`DdpError::Checkpoint`], on all ranks, when the folder cannot be read; or a fault of the group.
    pub fn latest(&self) -> Result<Option<Checkpoint>, DdpError> {
        self.agree(|mut all| all.pop())
    }

    /// The checkpoint with the best metric, the same for all ranks. All ranks call this.
    ///
    /// # Errors
    ///
    /// As [`latest`](Self::latest).
    pub fn best(&self, best: Best) -> Result<Option<Checkpoint>, DdpError> {
        self.agree(|all| choose(&all, best).cloned())
    }

    fn write(
        &self,
        unfinished: &Path,
        step: u64,
        metric: Option<f64>,
        write: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<()> {
        fs::create_dir(unfinished)?;
        write(unfinished)?;
        let description = Checkpoint {
            step,
            metric,
            folder: PathBuf::new(),
        };
        fs::write(
            unfinished.join(DESCRIPTION),
            serde_json::to_vec(&description)?,
        )?;
        flush(unfinished)?;
        let name = format!("{PREFIX}{step:012}");
        let finished = self.folder.join(&name);
        // Saved again: after a resume, for instance. A folder is not renamed over another; after a kill
        // between the two renames, `new` undoes the first.
        let replaced = self.folder.join(format!("{REPLACED}{name}"));
        let again = finished.exists();
        if again {
            fs::rename(&finished, &replaced)?;
        }
        let renamed = fs::rename(unfinished, &finished);
        if again && renamed.is_err() {
            fs::rename(&replaced, &finished)?;
        }
        renamed?;
        File::open(&self.folder)?.sync_all()?;
        match again {
            true => fs::remove_dir_all(replaced),
            false => Ok(()),
        }
    }

    /// All checkpoints, oldest first.
    fn list(&self) -> io::Result<Vec<Checkpoint>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            // Other files may be there.
            let name = entry.file_name();
            let step = name.to_string_lossy();
            let step = step.strip_prefix(PREFIX).unwrap_or_default();
            if step.is_empty() || step.bytes().any(|byte| !byte.is_ascii_digit()) {
                continue;
            }
            let folder = entry.path();
            let text = fs::read(folder.join(DESCRIPTION))?;
            let mut checkpoint: Checkpoint = serde_json::from_slice(&text)?;
            checkpoint.folder = folder;
            all.push(checkpoint);
        }
        all.sort_by_key(|checkpoint| checkpoint.step);
        Ok(all)
    }

    fn prune(&self) -> io::Result<()> {
        let Some(keep_last) = self.keep_last else {
            return Ok(());
        };
        let all = self.list()?;
        let best = self.keep_best.and_then(|best| choose(&all, best));
        let surplus = all.len().saturating_sub(keep_last);
        for old in &all[..surplus] {
            if best != Some(old) {
                self.discard(&old.folder)?;
            }
        }
        Ok(())
    }

    /// Removes a checkpoint. It is renamed first, so that a kill meanwhile leaves no half of one; what is
    /// left of it then goes when the folder is next [opened](Self::new).
    fn discard(&self, checkpoint: &Path) -> io::Result<()> {
        let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
        let discarded = self.folder.join(format!("{UNFINISHED}discarded-{name}"));
        fs::rename(checkpoint, &discarded)?;
        fs::remove_dir_all(discarded)
    }

    /// Does something on rank 0; its failure is everyone's.
    fn on_main(&self, body: impl FnOnce() -> io::Result<()>) -> Result<(), DdpError> {
        let problem = match self.group.is_main() {
            true => body().err().map(|error| error.to_string()),
            false => None,
        };
        let problem = problem.unwrap_or_default();
        let problem = self.group.broadcast_bytes(problem.as_bytes(), 0)?;
        match problem.is_empty() {
            true => Ok(()),
            false => Err(self.failed(&problem)),
        }
    }

    /// Chooses a checkpoint on rank 0, for everyone.
    fn agree(
        &self,
        choose: impl FnOnce(Vec<Checkpoint>) -> Option<Checkpoint>,
    ) -> Result<Option<Checkpoint>, DdpError> {
        let mut chosen = None;
        self.on_main(|| {
            chosen = choose(self.list()?);
            Ok(())
        })?;
        let text = serde_json::to_vec(&chosen.as_ref().map(|it| (it, &it.folder)))
            .map_err(|error| self.failed(error.to_string().as_bytes()))?;
        let text = self.group.broadcast_bytes(&text, 0)?;
        let chosen: Option<(Checkpoint, PathBuf)> = serde_json::from_slice(&text)
            .map_err(|error| self.failed(error.to_string().as_bytes()))?;
        Ok(chosen.map(|(checkpoint, folder)| Checkpoint {
            folder,
            ..checkpoint
        }))
    }

    fn failed(&self, problem: &[u8]) -> DdpError {
        DdpError::Checkpoint {
            path: self.folder.clone(),
            problem: String::from_utf8_lossy(problem).into_owned(),
        }
    }
}

/// The best of those that have a metric which is a number; the newest of equals.
fn choose(all: &[Checkpoint], best: Best) -> Option<&Checkpoint> {
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

/// Makes sure that a folder and all in it are on the disk.
fn flush(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => flush(&entry.path())?,
            false => File::open(entry.path())?.sync_all()?,
        }
    }
    File::open(folder)?.sync_all()
}
