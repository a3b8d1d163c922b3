//! Checkpoints: written by rank 0, all or nothing, and read by all ranks alike.

mod agree;
mod disk;
mod saved;
mod states;

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

#[cfg(feature = "train")]
pub(crate) use self::agree::seen_by_all;
pub(crate) use self::disk::{if_there, make_folder, sync_folder};
pub use self::saved::{Best, Checkpoint};
use self::{disk::flush, saved::choose};
use crate::{DdpError, ProcessGroup};

/// The file that describes a checkpoint, next to the program's files.
const DESCRIPTION: &str = "checkpoint.json";
const PREFIX: &str = "step-";
const UNFINISHED: &str = ".unfinished-";
/// The prefix of the old checkpoint's name while its step is being saved again.
const REPLACED: &str = ".replaced-";
/// How long the other ranks wait while rank 0 writes, if no limit is set.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3600);

/// A folder of checkpoints, each in its own subfolder.
///
/// A checkpoint is written under another name, flushed to the disk, and then renamed, so that every checkpoint
/// under its own name is whole at any moment. The next [save](Self::save) removes what an interrupted run left
/// unfinished. Until then, nothing in the folder changes, so another program may read it during a training.
///
/// Checkpoints are ordered by when they were written, not by step. For example, if a run resumes from step 300,
/// the [best](Self::best), although step 500 was saved, its step 310 comes after step 500: 310 is then the
/// [latest](Self::latest), and the earlier checkpoints of steps after 300 are removed like other old ones.
///
/// While rank 0 writes, the other ranks wait for up to an hour, or for the group's time limit if it is longer
/// (see [`timeout`](Self::timeout)). If rank 0 dies, they notice at once.
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
    /// Opens a folder of checkpoints, and creates it if it does not exist. All ranks call this. To read a checkpoint, all ranks
    /// must see the folder that rank 0 writes to: on several machines, take one that they share.
    ///
    /// # Errors
    ///
    /// [`DdpError::Checkpoint`], on all ranks, when rank 0 cannot use the folder; or a fault of the group.
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

    /// How long the other ranks wait while rank 0 writes or reads, instead of the time limit of the group's
    /// other calls. Default: an hour, or the group's limit if it is longer.
    ///
    /// # Panics
    ///
    /// Panics if it is 0.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.group = self.group.with_timeout(timeout);
        self
    }

    /// Keeps only the last `count` checkpoints that were written (at least one). Default: all.
    ///
    /// Burn (0.22.1) reads a tensor from a record's file when it is first used, and panics if the file is gone. On ranks other than
    /// 0, an optimizer's state of a parameter that has had no gradient since a resume is still unread when rank 0 removes the checkpoint
    /// that it is from. So with more than one rank, read the files into memory (`ModuleOptimizer::from_bytes`), or keep them all.
    pub fn keep_last(mut self, count: usize) -> Self {
        self.keep_last = Some(count.max(1));
        self
    }

    /// Also keeps the checkpoint with the best metric, however old it is.
    pub fn keep_best(mut self, best: Best) -> Self {
        self.keep_best = Some(best);
        self
    }

    /// Saves a checkpoint: on rank 0, `write` gets a folder to write files to. All ranks call this, and none
    /// returns before the checkpoint is safe on the disk.
    ///
    /// Read the model's state after a call of [`Module::valid`](burn::module::Module::valid): running
    /// statistics only apply their last update then, and a record would miss it otherwise.
    ///
    /// # Errors
    ///
    /// [`DdpError::Checkpoint`], on all ranks, when the checkpoint could not be written (earlier ones are
    /// unchanged); or a fault of the group. If an old checkpoint cannot be removed, this is no error: the log
    /// (`warn`) says so, and the next save tries again.
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
                // Return the first error. The next save tries again to remove the folder.
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

    /// The checkpoint that was written last, the same on all ranks. All ranks call this.
    ///
    /// A folder that is named like a checkpoint's but has no description does not count, nor does one with a
    /// damaged description, which the log (`warn`) reports.
    ///
    /// # Errors
    ///
    /// [`DdpError::Checkpoint`], on all ranks, when the folder cannot be read, or a rank does not see the checkpoint; or a
    /// fault of the group.
    pub fn latest(&self) -> Result<Option<Checkpoint>, DdpError> {
        self.agree(|mut all| all.pop())
    }

    /// The checkpoint with the best metric, the same on all ranks. All ranks call this.
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
        // A run that was killed may have left it.
        if_there(fs::remove_dir_all(unfinished))?;
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
        // The step is saved again, for example after a resume. A folder cannot be renamed over another. If the
        // run is killed between the two renames, the old checkpoint is found under its other name.
        let replaced = self.folder.join(format!("{REPLACED}{name}"));
        let again = finished.exists();
        if again {
            // It may be left from last time.
            if_there(fs::remove_dir_all(&replaced))?;
            fs::rename(&finished, &replaced)?;
        }
        let renamed = fs::rename(unfinished, &finished);
        if again && renamed.is_err() {
            fs::rename(&replaced, &finished)?;
        }
        renamed?;
        sync_folder(&self.folder)
    }

    /// Cleans up what a killed run has left.
    fn tidy(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let replaced = name.strip_prefix(REPLACED).map(|it| self.folder.join(it));
            match replaced {
                // The new checkpoint did not get its final name.
                Some(step) if !step.exists() => fs::rename(entry.path(), step)?,
                None if !name.starts_with(UNFINISHED) => {}
                _ => if_there(fs::remove_dir_all(entry.path())).map(drop)?,
            }
        }
        Ok(())
    }

    /// Removes checkpoints that are not to be kept. Always keeps the one that was written last.
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

    /// Removes a checkpoint. Renames it first, so that a kill does not leave half a checkpoint; the next save
    /// removes what is left.
    fn discard(&self, checkpoint: &Path) -> io::Result<()> {
        let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
        let discarded = self.folder.join(format!("{UNFINISHED}discarded-{name}"));
        fs::rename(checkpoint, &discarded)?;
        fs::remove_dir_all(discarded)
    }
}
