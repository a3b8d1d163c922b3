//! Finds NCCL on this machine, once for each process.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use super::{
    ffi::{Library, UniqueId},
    search::{Candidate, VARIABLE, candidates},
};
use crate::{NcclError, NcclVersion};

/// The oldest version that is supported: the first with nonblocking communicators.
const OLDEST: NcclVersion = NcclVersion {
    major: 2,
    minor: 14,
    patch: 0,
};

/// The library, its file and its version.
pub(super) struct Found {
    library: Library,
    file: String,
    pub(super) version: NcclVersion,
}

/// NCCL, or why none can be used. It is loaded at the first call.
pub(super) fn nccl() -> Result<&'static Found, NcclError> {
    static FOUND: OnceLock<Result<Found, NcclError>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        load(candidates(variable, folders))
    });
    found.as_ref().map_err(Clone::clone)
}

fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Loads the first of the candidates that can be loaded.
fn load(candidates: Vec<Candidate>) -> Result<Found, NcclError> {
    let mut searched = Vec::new();
    let mut broken = None;
    for candidate in candidates {
        let file = candidate.to_string();
        match open(&candidate) {
            Some(Ok(library)) => return check(library, file),
            // The error of a library that exists is more useful than that of a missing one.
            Some(Err(problem)) if !is_absent(&file, &problem) => {
                broken.get_or_insert(NcclError::NotUsable {
                    library: file,
                    problem,
                });
            }
            _ => searched.push(file),
        }
    }
    Err(broken.unwrap_or(NcclError::NotFound { searched }))
}

fn open(candidate: &Candidate) -> Option<Result<Library, String>> {
    match candidate {
        #[cfg(feature = "nccl")]
        Candidate::Cudarc => Library::by_cudarc(),
        #[cfg(not(feature = "nccl"))]
        Candidate::Cudarc => None,
        Candidate::File(path) => Some(Library::open(path)),
    }
}

/// Whether the loader's message means that this very file is missing, and not another file that it needs.
fn is_absent(file: &str, problem: &str) -> bool {
    problem.contains(file) && problem.contains("No such file")
}

fn check(library: Library, file: String) -> Result<Found, NcclError> {
    let version = match library.version() {
        Ok(code) => supported(code, &file)?,
        Err(problem) => {
            return Err(NcclError::NotUsable {
                library: file,
                problem,
            });
        }
    };
    log::debug!("burn-ddp: NCCL {version} from {file} ({VARIABLE} names another)");
    Ok(Found {
        library,
        file,
        version,
    })
}

/// The version that a code of NCCL stands for, if it is not too old.
fn supported(code: u32, file: &str) -> Result<NcclVersion, NcclError> {
    let version = NcclVersion::from_code(code);
    match version >= OLDEST {
        true => Ok(version),
        false => Err(NcclError::TooOld {
            library: file.into(),
            version,
            oldest: OLDEST,
        }),
    }
}

impl Found {
    pub(super) fn library(&self) -> &Library {
        &self.library
    }

    /// A new identity for a communicator.
    pub(super) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        self.library
            .unique_id()
            .map_err(|problem| self.unusable(problem))
    }

    pub(super) fn unusable(&self, problem: String) -> NcclError {
        NcclError::NotUsable {
            library: self.file.clone(),
            problem,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs a library (`pip download nvidia-nccl-cu13` has one; `BURN_DDP_NCCL` names it), but no GPU.
    #[test]
    fn the_real_library_tells_its_version_and_makes_identities() {
        let found = match nccl() {
            Ok(found) => found,
            Err(error @ NcclError::NotFound { .. }) => {
                eprintln!("skipped: no NCCL library: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        assert!(
            found.version >= OLDEST && found.version.major < 10,
            "{}",
            found.version
        );
        let (one, other) = (found.unique_id().unwrap(), found.unique_id().unwrap());
        assert_ne!(one, other);
        assert_ne!(one, [0; 128]);
    }

    /// If cudarc finds no library, as on a machine without NVIDIA's developer packages, it panics when asked to load one.
    #[cfg(feature = "nccl")]
    #[test]
    fn what_cudarc_finds_is_used_and_what_it_does_not_find_is_listed() {
        match load(vec![Candidate::Cudarc]) {
            Ok(found) => assert_eq!(found.file, "libnccl.so"),
            Err(NcclError::NotFound { searched }) => assert_eq!(searched, ["libnccl.so"]),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn versions_without_what_is_needed_are_refused() {
        assert_eq!(supported(21_403, "nccl").unwrap().to_string(), "2.14.3");
        let error = supported(21_304, "/opt/libnccl.so.2").unwrap_err();
        assert!(matches!(error, NcclError::TooOld { .. }));
        let error = error.to_string();
        for text in ["/opt/libnccl.so.2", "2.13.4", "2.14.0", "BURN_DDP_NCCL"] {
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn what_is_not_there_is_listed_and_what_is_broken_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("libnccl.so.2");
        let name = missing.display().to_string();
        let Err(NcclError::NotFound { searched }) = load(vec![Candidate::File(missing.clone())])
        else {
            panic!("there is no such file");
        };
        assert_eq!(searched, std::slice::from_ref(&name));

        fs::write(&missing, "no library").unwrap();
        let Err(NcclError::NotUsable { library, problem }) = load(vec![Candidate::File(missing)])
        else {
            panic!("that is no library");
        };
        assert_eq!(library, name);
        assert!(!problem.is_empty());

        // A bare name that the system's loader cannot find is absent. A library that lacks a dependency is not.
        let name = "libnccl-of-another-name.so.2";
        let problem = Library::open(Path::new(name)).err().unwrap();
        assert!(is_absent(name, &problem), "{problem}");
        let lacking = "libcudart.so.12: cannot open shared object file: No such file or directory";
        let older = "/lib/libc.so.6: version `GLIBC_2.38' not found (required by libnccl.so.2)";
        assert!(!is_absent("libnccl.so.2", lacking) && !is_absent("libnccl.so.2", older));

        // A library, but not NCCL.
        let Err(NcclError::NotUsable { problem, .. }) = Library::open(Path::new("libc.so.6"))
            .map_err(|problem| NcclError::NotUsable {
                library: "libc.so.6".into(),
                problem,
            })
            .and_then(|library| check(library, "libc.so.6".into()).map(drop))
        else {
            panic!("libc has no ncclGetVersion");
        };
        assert!(problem.contains("ncclGetVersion"), "{problem}");
    }
}
