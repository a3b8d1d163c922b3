//! Operations on files and folders.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

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
    File::open(parent)?.sync_all()
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
    File::open(folder)?.sync_all()
}

/// The message of an error, or its debug text if the message is empty, because an empty text means success.
pub(super) fn in_words(error: &io::Error) -> String {
    match error.to_string() {
        words if words.is_empty() => format!("{error:?}"),
        words => words,
    }
}
