//! burn-train's checkpoints, all or nothing.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
};

use burn::tensor::Bytes;
use burn_train::checkpoint::{Checkpoint, Checkpointer, CheckpointerError};

use crate::{
    DdpError, ProcessGroup,
    checkpoint::{if_there, make_folder, seen_by_all, sync_folder},
};

/// The names that burn-train's default checkpointers give their files.
const PARTS: [&str; 3] = ["model", "optim", "scheduler"];
const UNFINISHED: &str = ".unfinished-";
/// The prefix of the file that marks an epoch whose parts are all on the disk, until they have their final names.
const WHOLE: &str = ".whole-";

/// A folder of burn-train's checkpoints in which each epoch is there with its model, optimizer and scheduler, or not at all.
///
/// burn-train writes and deletes these three in place, each on its own thread: a kill or a full disk leaves half a
/// file, or a new model with an old optimizer. Here, each file is written under another name and flushed to the disk.
/// When all three are, a marker file says so, and they get their final names. If a run is killed in between, the next
/// save or deletion of an epoch finishes or removes what is left. Until then, an epoch that is complete on the disk is
/// read where it is, and nothing in the folder changes, so another program may read it during a training.
///
/// An epoch is deleted only when another one is complete: while one is being written, or if it could not be
/// written, older ones stay, even if burn-train asks for them to be deleted first (as `MetricCheckpointingStrategy`
/// does). The files are burn-train's: `FileCheckpointer` can read them, and its files can be read here.
///
/// ```
/// use burn_ddp::{EpochCheckpoints, ProcessGroup};
/// # use burn::store::ModuleRecord;
/// # use burn::{module::Module, nn::LinearConfig, tensor::Device};
/// # use burn_train::checkpoint::Checkpointer;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?
/// let epochs = EpochCheckpoints::open(folder, &group)?;
/// // let training =
/// //     training.with_custom_checkpointers(epochs.model(), epochs.optimizer(), epochs.scheduler());
/// // let training = match epochs.last() {
/// //     Some(epoch) => training.checkpoint(epoch), // resumes
/// //     None => training,
/// // };
/// assert_eq!(epochs.last(), None);
/// # let record = || LinearConfig::new(4, 2).init(&Device::flex()).into_record();
/// # epochs.model().save(3, record())?;
/// # epochs.optimizer().save(3, record())?;
/// # assert!(!folder.join("model-3.bpk").exists());
/// # epochs.scheduler().save(3, record())?;
/// # assert_eq!(EpochCheckpoints::open(folder, &group)?.last(), Some(3));
/// # let _: ModuleRecord = epochs.optimizer().restore(3)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct EpochCheckpoints {
    folder: PathBuf,
    last: Option<usize>,
    writing: Arc<Mutex<Writing>>,
}

#[derive(Debug, Default)]
struct Writing {
    /// The parts that are on the disk, for epochs that are not complete yet.
    written: HashMap<usize, HashSet<&'static str>>,
    /// Epochs with a part that could not be written.
    failed: HashSet<usize>,
    /// Files to delete once another epoch is complete.
    to_delete: Vec<(&'static str, usize)>,
    /// Whether the remains of a killed run have been cleaned up.
    tidy: bool,
}

impl EpochCheckpoints {
    /// Opens a folder, and creates it if it does not exist. All ranks call this.
    ///
    /// # Errors
    ///
    /// [`DdpError::Checkpoint`], on all ranks, when rank 0 cannot use the folder, or a rank does not see the last epoch in it; or a
    /// fault of the group.
    pub fn open(folder: impl AsRef<Path>, group: &ProcessGroup) -> Result<Self, DdpError> {
        let folder = folder.as_ref();
        let found = match group.is_main() {
            true => last(folder).map_err(|error| error.to_string()),
            false => Ok(None),
        };
        let found = serde_json::to_vec(&found).expect("plain data");
        let failed = |problem| DdpError::Checkpoint {
            path: folder.into(),
            problem,
        };
        let found = group.broadcast_bytes(&found, 0)?;
        let found: Result<Option<usize>, String> =
            serde_json::from_slice(&found).map_err(|error| failed(error.to_string()))?;
        let last = found.map_err(failed)?;
        if let Some(epoch) = last {
            let model = PARTS[0];
            let names = [name(model, epoch), unfinished(model, epoch)];
            seen_by_all(group, &names.map(|name| folder.join(name)))?;
        }
        Ok(Self {
            folder: folder.into(),
            last,
            writing: Arc::default(),
        })
    }

    /// The last epoch in the folder when it was opened, the same on all ranks: the one with the highest number.
    /// A run that resumes from an earlier epoch should remove the later ones first; otherwise they count as its
    /// own until it gets there.
    pub fn last(&self) -> Option<usize> {
        self.last
    }

    /// The checkpointer of the model.
    pub fn model(&self) -> AtomicCheckpointer {
        self.part(PARTS[0])
    }

    /// The checkpointer of the optimizer.
    pub fn optimizer(&self) -> AtomicCheckpointer {
        self.part(PARTS[1])
    }

    /// The checkpointer of the learning rate scheduler.
    pub fn scheduler(&self) -> AtomicCheckpointer {
        self.part(PARTS[2])
    }

    fn part(&self, part: &'static str) -> AtomicCheckpointer {
        AtomicCheckpointer {
            part,
            folder: self.folder.clone(),
            writing: self.writing.clone(),
        }
    }
}

/// One of the three checkpointers of [`EpochCheckpoints`].
#[derive(Debug)]
pub struct AtomicCheckpointer {
    part: &'static str,
    folder: PathBuf,
    writing: Arc<Mutex<Writing>>,
}

impl AtomicCheckpointer {
    fn writing(&self) -> MutexGuard<'_, Writing> {
        self.writing.lock().expect("no panic under lock")
    }

    /// The same, for writing or deleting. The first call cleans up what a killed run has left.
    fn tidied(&self) -> Result<MutexGuard<'_, Writing>, CheckpointerError> {
        let mut writing = self.writing();
        if !writing.tidy {
            tidy(&self.folder).map_err(CheckpointerError::IOError)?;
            writing.tidy = true;
        }
        Ok(writing)
    }

    fn refuse_failed(&self, writing: &Writing, epoch: usize) -> Result<(), CheckpointerError> {
        match writing.failed.contains(&epoch) {
            false => Ok(()),
            true => Err(CheckpointerError::Unknown(format!(
                "another part of epoch {epoch} could not be written; open {} again",
                self.folder.display()
            ))),
        }
    }
}

impl<R: Checkpoint> Checkpointer<R> for AtomicCheckpointer {
    fn save(&self, epoch: usize, record: R) -> Result<(), CheckpointerError> {
        self.refuse_failed(&*self.tidied()?, epoch)?;
        let unfinished = self.folder.join(unfinished(self.part, epoch));
        let flush = || File::open(&unfinished)?.sync_all();
        let written = record
            .save(unfinished.clone())
            .and_then(|()| flush().map_err(CheckpointerError::IOError));
        let mut writing = self.writing();
        let written = written.and_then(|()| self.refuse_failed(&writing, epoch));
        if written.is_err() {
            // Return the first error. A part that is still being written will then fail, too.
            for part in PARTS {
                let _ = fs::remove_file(self.folder.join(self::unfinished(part, epoch)));
            }
            writing.written.remove(&epoch);
            writing.failed.insert(epoch);
            return written;
        }
        let parts = writing.written.entry(epoch).or_default();
        parts.insert(self.part);
        if parts.len() < PARTS.len() {
            return Ok(());
        }
        writing.written.remove(&epoch);
        let (to_delete, stays) = std::mem::take(&mut writing.to_delete)
            .into_iter()
            .partition::<Vec<_>, _>(|(_, other)| *other != epoch);
        writing.to_delete = stays;
        let finish = || {
            let note = self.folder.join(whole(epoch));
            File::create(&note)?.sync_all()?;
            sync_folder(&self.folder)?;
            finish(&self.folder, epoch)?;
            for &(part, epoch) in &to_delete {
                if_there(fs::remove_file(self.folder.join(name(part, epoch))))?;
            }
            Ok(())
        };
        let finished = finish();
        if finished.is_err() {
            writing.failed.insert(epoch);
            // What is gone already does not matter.
            writing.to_delete.extend(to_delete);
        }
        finished.map_err(CheckpointerError::IOError)
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        let mut writing = self.tidied()?;
        // This may be the last complete epoch, while the one that replaces it is not written yet.
        let at_rest = writing.written.is_empty() && writing.failed.is_empty();
        let last = last(&self.folder).map_err(CheckpointerError::IOError)?;
        if at_rest && last > Some(epoch) {
            let file = self.folder.join(name(self.part, epoch));
            let removed = if_there(fs::remove_file(file)).map(drop);
            return removed.map_err(CheckpointerError::IOError);
        }
        writing.to_delete.push((self.part, epoch));
        Ok(())
    }

    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        let unfinished = self.folder.join(unfinished(self.part, epoch));
        let file = match self.folder.join(whole(epoch)).exists() && unfinished.exists() {
            true => unfinished,
            false => self.folder.join(name(self.part, epoch)),
        };
        // Into memory: a record of a file reads a state when its parameter first has a gradient, and rank 0 may have deleted or
        // renamed the file by then.
        let bytes = fs::read(&file).map_err(|error| {
            let problem = format!("reading {}: {error}", file.display());
            CheckpointerError::IOError(io::Error::new(error.kind(), problem))
        })?;
        R::checkpoint_from_bytes(Bytes::from_bytes_vec(bytes)).map_err(CheckpointerError::Record)
    }
}

fn name(part: &str, epoch: usize) -> String {
    format!("{part}-{epoch}.bpk")
}

fn unfinished(part: &str, epoch: usize) -> String {
    format!("{UNFINISHED}{}", name(part, epoch))
}

fn whole(epoch: usize) -> String {
    format!("{WHOLE}{epoch}")
}

/// Gives the parts of an epoch their final names, if they do not have them yet.
fn finish(folder: &Path, epoch: usize) -> io::Result<()> {
    for part in PARTS {
        let unfinished = folder.join(unfinished(part, epoch));
        if_there(fs::rename(unfinished, folder.join(name(part, epoch))))?;
    }
    sync_folder(folder)?;
    fs::remove_file(folder.join(whole(epoch)))
}

/// The epoch in the name of a part's file.
fn epoch_of(name: &str, part: &str) -> Option<usize> {
    let name = name.strip_prefix(part)?.strip_prefix('-')?;
    name.strip_suffix(".bpk")?.parse().ok()
}

/// The epoch that a marker file says is complete on the disk.
fn noted(name: &str) -> Option<usize> {
    name.strip_prefix(WHOLE)?.parse().ok()
}

fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(folder)?;
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// The last epoch that is complete, under final names or marked.
fn last(folder: &Path) -> io::Result<Option<usize>> {
    make_folder(folder)?;
    let names = names(folder)?;
    let epochs = |part| names.iter().filter_map(move |name| epoch_of(name, part));
    let whole = epochs(PARTS[0]).filter(|model| {
        PARTS[1..]
            .iter()
            .all(|part| epochs(part).any(|epoch| epoch == *model))
    });
    Ok(whole
        .chain(names.iter().filter_map(|name| noted(name)))
        .max())
}

/// Finishes epochs that are complete on the disk, and removes other unfinished files.
fn tidy(folder: &Path) -> io::Result<()> {
    for epoch in names(folder)?.iter().filter_map(|name| noted(name)) {
        finish(folder, epoch)?;
    }
    for name in names(folder)? {
        let part = name.strip_prefix(UNFINISHED);
        if part.is_some_and(|name| PARTS.iter().any(|part| epoch_of(name, part).is_some())) {
            if_there(fs::remove_file(folder.join(name)))?;
        }
    }
    Ok(())
}
