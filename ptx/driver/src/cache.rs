//! The PTX of kernels that NVRTC has compiled before, in files, since compiling takes most of a program's time here.

use std::{
    collections::hash_map::DefaultHasher,
    fs,
    hash::{Hash, Hasher},
    path::{Path, PathBuf},
};

/// What PTX is made of.
#[derive(Hash)]
pub(crate) struct Key<'a> {
    pub(crate) version: (i32, i32),
    pub(crate) source: &'a str,
    pub(crate) options: &'a [String],
}

impl Key<'_> {
    fn path(&self, folder: &Path) -> PathBuf {
        let half = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            (salt, self).hash(&mut hasher);
            hasher.finish()
        };
        folder.join(format!("{:016x}{:016x}.ptx", half(0), half(1)))
    }

    /// What was kept in a folder.
    pub(crate) fn find(&self, folder: &Path) -> Option<Vec<u8>> {
        fs::read(self.path(folder)).ok()
    }

    /// Keeps PTX in a folder. Where it cannot be written, NVRTC compiles again.
    pub(crate) fn keep(&self, folder: &Path, ptx: &[u8]) {
        let path = self.path(folder);
        // Under another name first: other processes read.
        let partial = path.with_extension(std::process::id().to_string());
        if fs::write(&partial, ptx).is_ok() {
            let _ = fs::rename(partial, path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_is_found_by_all_that_it_is_made_of() {
        let folder = tempfile::tempdir().unwrap();
        let options = ["--gpu-architecture=sm_90a".to_string()];
        let key = |version, source, options| Key {
            version,
            source,
            options,
        };
        let kept = key((13, 0), "a source", &options);
        assert_eq!(kept.find(folder.path()), None);
        kept.keep(folder.path(), b"ptx\0");
        assert_eq!(kept.find(folder.path()).as_deref(), Some(&b"ptx\0"[..]));
        // Nothing else lies there, such as what was written first.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

        for other in [
            key((13, 1), "a source", &options),
            key((13, 0), "another source", &options),
            key((13, 0), "a source", &[]),
        ] {
            assert_eq!(other.find(folder.path()), None);
        }
        kept.keep(&folder.path().join("no folder"), b"ptx\0");
    }
}
