//! Checkpoints: written by rank 0, all or nothing, and found again by all ranks alike.

mod disk;
mod states;

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

pub(crate) use self::disk::make_folder;
use self::disk::{flush, in_words, remove_folder};
use crate::{DdpError, ProcessGroup};

/// The file that describes a checkpoint, beside what the program wrote.
const DESCRIPTION: &str = "checkpoint.json";
const PREFIX: &str = "step-";
const UNFINISHED: &str = ".unfinished-";
/// Before the name of a checkpoint whose step is being saved again.
const REPLACED: &str = ".replaced-";
/// How long the others wait for what rank 0 writes, where no limit is set.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3600);

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
    /// The metric by which checkpoints are compared. None where it was not finite.
    pub metric: Option<f64>,
    /// Its number among those that were written to its folder, from 1: the highest is the
    /// [latest](Checkpoints::latest). 0 where the description says nothing of it.
    #[serde(default)]
    pub number: u64,
    /// The folder with the program's files.
    #[serde(skip)]
    pub folder: PathBuf,
}

/// A folder of checkpoints, each a folder of its own.
///
/// A checkpoint is written under another name, flushed to the disk and renamed: at any moment, what
/// is there is whole. What an interrupted run left unfinished goes with the next [save](Self::save). Until
/// then, nothing in the folder changes: another program may read it while a training writes.
///
/// The order of checkpoints is that in which they were written, whatever their steps. A run that goes on from
/// step 300, the [best](Self::best), after 500 were made writes 310 behind 500: 310 is then the
/// [latest](Self::latest), and what was made of the steps after 300 before goes as the oldest do.
///
/// While rank 0 writes, the others wait for an hour, or for the group's time limit where that is longer:
/// see [`timeout`](Self::timeout). That rank 0 has died they know at once.
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
            group: group.with_timeout(group.timeout().max(PATIENCE)),
            keep_last: None,
            keep_best: None,
        };
        checkpoints.on_main(|| {
            make_folder(&checkpoints.folder)?;
            fs::read_dir(&checkpoints.folder).map(drop)
        })?;
        Ok(checkpoints)
    }

    /// How long the other ranks wait for what rank 0 writes or reads, instead of the time limit of the group's
    /// other calls. Default: an hour, or the group's limit where that is longer.
    ///
    /// # Panics
    ///
    /// Panics if it is 0.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.group = self.group.with_timeout(timeout);
        self
    }

    /// Keeps only the `count` checkpoints that were written last (at least one). Default: all.
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
    /// they were); or a fault of the group. An old one that cannot be removed is no error: the log (`warn`)
    /// tells of it, and the next save tries again.
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
                // The error that matters is the first; the next save will try to remove it again.
                let _ = fs::remove_dir_all(&unfinished);
            }
            result?;
            if let Err(error) = self.tidy().and_then(|()| self.prune()) {
                let folder = self.folder.display();
                log::warn!("burn-ddp: old checkpoints in {folder} could not be removed: {error}");
            }
            Ok(())
        })
    }

    /// The checkpoint that was written last, the same for all ranks. All ranks call this.
    ///
    /// A folder that is called like a checkpoint's but has no description is none, nor is one whose description
    /// is damaged, of which the log (`warn`) tells.
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
        // Of a run that was killed.
        remove_folder(unfinished)?;
        fs::create_dir(unfinished)?;
        write(unfinished)?;
        let description = Checkpoint {
            step,
            metric,
            number: self.list()?.last().map_or(0, |last| last.number) + 1,
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
        // between the two renames, the old one is found under its other name.
        let replaced = self.folder.join(format!("{REPLACED}{name}"));
        let again = finished.exists();
        if again {
            // One that could not be removed the last time.
            remove_folder(&replaced)?;
            fs::rename(&finished, &replaced)?;
        }
        let renamed = fs::rename(unfinished, &finished);
        if again && renamed.is_err() {
            fs::rename(&replaced, &finished)?;
        }
        renamed?;
        File::open(&self.folder)?.sync_all()
    }

    /// All checkpoints, in the order in which they were written.
    fn list(&self) -> io::Result<Vec<Checkpoint>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            // Other files may be there.
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
            match describe(entry.path()) {
                Ok(checkpoint) => all.push(checkpoint),
                // Not one of ours.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let folder = entry.path();
                    log::warn!("burn-ddp: {} is no checkpoint: {error}", folder.display());
                }
            }
        }
        all.sort_by_key(|checkpoint| (checkpoint.number, checkpoint.step));
        Ok(all)
    }

    /// Puts what a kill has left in order.
    fn tidy(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            match name.strip_prefix(REPLACED).map(|it| self.folder.join(it)) {
                // The new one had not come to its place.
                Some(step) if !step.exists() => fs::rename(entry.path(), step)?,
                Some(_) => remove_folder(&entry.path())?,
                None if name.starts_with(UNFINISHED) => remove_folder(&entry.path())?,
                None => {}
            }
        }
        Ok(())
    }

    /// Removes what is not to be kept. The one that was written last always is.
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
    /// left of it then goes with the next save.
    fn discard(&self, checkpoint: &Path) -> io::Result<()> {
        let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
        let discarded = self.folder.join(format!("{UNFINISHED}discarded-{name}"));
        fs::rename(checkpoint, &discarded)?;
        fs::remove_dir_all(discarded)
    }

    /// Does something on rank 0; its failure is everyone's.
    fn on_main(&self, body: impl FnOnce() -> io::Result<()>) -> Result<(), DdpError> {
        let problem = match self.group.is_main() {
            true => body().err().map(|error| in_words(&error)),
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
        let mut text = Vec::new();
        self.on_main(|| {
            let chosen = choose(self.list()?);
            text = serde_json::to_vec(&chosen.as_ref().map(|it| (it, &it.folder)))?;
            Ok(())
        })?;
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

/// The checkpoint in a folder.
fn describe(folder: PathBuf) -> io::Result<Checkpoint> {
    let text = fs::read(folder.join(DESCRIPTION))?;
    let checkpoint: Checkpoint = serde_json::from_slice(&text)?;
    Ok(Checkpoint {
        folder,
        ..checkpoint
    })
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
