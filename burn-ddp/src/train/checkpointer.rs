//! burn-train's checkpoints, whole or not there.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use burn_train::checkpoint::{Checkpoint, Checkpointer, CheckpointerError, FileCheckpointer};

/// burn-train's `FileCheckpointer`, with files that are written under another name, flushed to the disk and
/// renamed: a kill or a full disk leaves no half of one under its name. The files are the same, so that
/// either resumes from what the other wrote.
///
/// ```
/// use burn_ddp::AtomicCheckpointer;
/// use burn::store::ModuleRecord;
/// use burn::{module::Module, nn::LinearConfig, tensor::Device};
/// use burn_train::checkpoint::Checkpointer;
///
/// # fn main() -> Result<(), burn_train::checkpoint::CheckpointerError> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// // training.with_custom_checkpointers(
/// //     AtomicCheckpointer::new(&folder, "model"),
/// //     AtomicCheckpointer::new(&folder, "optim"),
/// //     AtomicCheckpointer::new(&folder, "scheduler"),
/// // )
/// let checkpointer = AtomicCheckpointer::new(folder, "model");
/// let model = LinearConfig::new(4, 2).init(&Device::flex());
/// checkpointer.save(3, model.into_record())?;
/// let record: ModuleRecord = checkpointer.restore(3)?;
/// assert!(folder.join("model-3.bpk").exists());
/// # let _ = record;
/// # Ok(())
/// # }
/// ```
pub struct AtomicCheckpointer {
    folder: PathBuf,
    name: String,
    files: FileCheckpointer,
}

impl AtomicCheckpointer {
    /// Keeps `NAME-EPOCH.bpk` in a folder, which is made if it does not exist.
    pub fn new(folder: impl AsRef<Path>, name: &str) -> Self {
        Self {
            folder: folder.as_ref().into(),
            name: name.into(),
            files: FileCheckpointer::new(folder, name),
        }
    }
}

impl<R: Checkpoint> Checkpointer<R> for AtomicCheckpointer {
    fn save(&self, epoch: usize, record: R) -> Result<(), CheckpointerError> {
        let name = format!("{}-{epoch}.bpk", self.name);
        let unfinished = self.folder.join(format!(".unfinished-{name}"));
        let result = record.save(unfinished.clone()).and_then(|()| {
            put(&unfinished, &self.folder.join(&name)).map_err(CheckpointerError::IOError)
        });
        if result.is_err() {
            // The error that matters is the first; the next save would write over it.
            let _ = fs::remove_file(unfinished);
        }
        result
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        Checkpointer::<R>::delete(&self.files, epoch)
    }

    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        self.files.restore(epoch)
    }
}

/// Gives a file that is on the disk its name there.
fn put(unfinished: &Path, finished: &Path) -> io::Result<()> {
    File::open(unfinished)?.sync_all()?;
    fs::rename(unfinished, finished)?;
    match finished.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}
