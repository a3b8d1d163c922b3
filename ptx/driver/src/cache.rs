//! The PTX of kernels that NVRTC has compiled before, in files, since compiling takes most of a program's time here.

use std::{
    collections::hash_map::DefaultHasher,
    fs,
    hash::{Hash, Hasher},
    path::PathBuf,
};

/// What PTX is made of.
#[derive(Hash)]
pub(crate) struct Key<'a> {
    pub(crate) version: (i32, i32),
    pub(crate) source: &'a str,
    pub(crate) options: &'a [String],
}

impl Key<'_> {
    /// Its file, in the folder that `PTX_DRIVER_KERNELS` names.
    fn path(&self) -> Option<PathBuf> {
        let folder = PathBuf::from(std::env::var_os("PTX_DRIVER_KERNELS")?);
        let half = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            (salt, self).hash(&mut hasher);
            hasher.finish()
        };
        Some(folder.join(format!("{:016x}{:016x}.ptx", half(0), half(1))))
    }

    pub(crate) fn find(&self) -> Option<Vec<u8>> {
        fs::read(self.path()?).ok()
    }

    /// Keeps PTX. Without a folder, or where it cannot be written, NVRTC compiles again.
    pub(crate) fn keep(&self, ptx: &[u8]) {
        let Some(path) = self.path() else { return };
        // Under another name first: other processes read.
        let partial = path.with_extension(std::process::id().to_string());
        if fs::write(&partial, ptx).is_ok() {
            let _ = fs::rename(partial, path);
        }
    }
}
