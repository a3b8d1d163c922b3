//! Operations on files and folders.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use nix::libc::{EBADF, EINVAL, ENOTSUP};

/// Creates a folder and its missing parents, and flushes their names to the disk.
pub(crate) fn make_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() || folder.as_os_str().is_empty() {
        return Ok(());
    }
    let parent = folder.parent().unwrap_or(Path::new(""));
    make_folder(parent)?;
    match fs::create_dir(folder) {
        // Another process was faster.
        Err(_) if folder.is_dir() => {}
        made => made?,
    }
    let parent = match parent.as_os_str().is_empty() {
        true => Path::new("."),
        false => parent,
    };
    sync_folder(parent)
}

/// Flushes the names of the files in a folder to the disk, if its file system can do that. Otherwise they are as safe as that
/// file system keeps them, and a checkpoint there is better than none.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        Err(error) if is_unsupported(&error) => {
            let folder = folder.display();
            log::debug!("burn-ddp: the file system of {folder} does not flush folders: {error}");
            Ok(())
        }
        synced => synced,
    }
}

/// Whether a file system says that it has no fsync of folders, as some shares and file systems of virtual machines do.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(EINVAL | EBADF | ENOTSUP))
}

/// What an operation on a file or folder returned, or `None` if there is no such file or folder, which is no error here.
pub(crate) fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

/// Flushes a folder and everything in it to the disk.
pub(super) fn flush(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => flush(&entry.path())?,
            false => File::open(entry.path())?.sync_all()?,
        }
    }
    sync_folder(folder)
}

/// The message of an error, or its debug text if the message is empty, because an empty text means success.
pub(super) fn in_words(error: &io::Error) -> String {
    match error.to_string() {
        words if words.is_empty() => format!("{error:?}"),
        words => words,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_synced_where_their_file_system_can() {
        let folder = tempfile::tempdir().unwrap();
        sync_folder(folder.path()).unwrap();
        let missing = sync_folder(&folder.path().join("missing"));
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
        // Its file system has no fsync of folders.
        #[cfg(target_os = "linux")]
        sync_folder(Path::new("/proc/self")).unwrap();
    }

    #[test]
    fn a_full_or_broken_disk_is_an_error() {
        use nix::libc::{EACCES, EDQUOT, EIO, ENOENT, ENOSPC, EROFS};

        let error = io::Error::from_raw_os_error;
        let unsupported = [EINVAL, EBADF, ENOTSUP].map(error);
        assert!(unsupported.iter().all(is_unsupported));
        let errors = [EIO, ENOSPC, EDQUOT, EROFS, EACCES, ENOENT].map(error);
        assert!(!errors.iter().any(is_unsupported));
        assert!(!is_unsupported(&io::ErrorKind::InvalidInput.into()));
    }
}
