//! The places where the library may be.

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// The environment variable that names the library's file.
pub(super) const VARIABLE: &str = "BURN_DDP_NCCL";

/// The library in NVIDIA's Python wheel, below `site-packages`.
const WHEEL: &str = "nvidia/nccl/lib/libnccl.so.2";

/// A place to look in.
#[derive(Debug, PartialEq)]
pub(super) enum Candidate {
    /// Where cudarc, and with it CubeCL, finds the library: under the name that developer packages install.
    Cudarc,
    /// A path, or a name that the system's loader looks up.
    File(PathBuf),
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cudarc => f.write_str("libnccl.so"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// The places to try. If `BURN_DDP_NCCL` is set, only the file that it names. Otherwise, in this order: where cudarc looks, so
/// that a process has one NCCL; the name that every installation has; NVIDIA's wheel in a Python environment, in the user's
/// packages, and in the system's packages.
///
/// `variable` reads the environment, `folders` lists the folders in a folder.
pub(super) fn candidates(
    variable: impl Fn(&str) -> Option<String>,
    folders: impl Fn(&Path) -> Vec<PathBuf>,
) -> Vec<Candidate> {
    if let Some(path) = variable(VARIABLE) {
        return vec![Candidate::File(path.into())];
    }
    let mut candidates = vec![Candidate::Cudarc, Candidate::File("libnccl.so.2".into())];
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .into_iter()
        .filter_map(&variable);
    let homes = environments
        .map(PathBuf::from)
        .chain(variable("HOME").map(|home| Path::new(&home).join(".local")))
        .chain(["/usr/local", "/usr"].map(PathBuf::from));
    for home in homes {
        let mut pythons = folders(&home.join("lib"));
        pythons.retain(|folder| {
            let name = folder.file_name().unwrap_or_default();
            name.to_string_lossy().starts_with("python3")
        });
        pythons.sort();
        for python in pythons {
            for packages in ["site-packages", "dist-packages"] {
                candidates.push(Candidate::File(python.join(packages).join(WHEEL)));
            }
        }
    }
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none(_: &Path) -> Vec<PathBuf> {
        Vec::new()
    }

    #[test]
    fn a_named_file_is_the_only_one() {
        let named = |name: &str| (name == VARIABLE).then(|| "/opt/libnccl.so.2".to_owned());
        let found = candidates(named, none);
        assert_eq!(found, [Candidate::File("/opt/libnccl.so.2".into())]);
        assert_eq!(found[0].to_string(), "/opt/libnccl.so.2");
    }

    #[test]
    fn the_loader_comes_before_wheels() {
        let found = candidates(|_| None, none);
        let names: Vec<String> = found.iter().map(Candidate::to_string).collect();
        assert_eq!(names, ["libnccl.so", "libnccl.so.2"]);
        assert_eq!(found[0], Candidate::Cudarc);
        let tree = |folder: &Path| match folder.to_str() {
            Some("/venv/lib") => vec!["/venv/lib/pkgconfig".into(), "/venv/lib/python3.12".into()],
            Some("/home/ada/.local/lib") => vec!["/home/ada/.local/lib/python3.9".into()],
            _ => Vec::new(),
        };
        let variables = |name: &str| match name {
            "VIRTUAL_ENV" => Some("/venv".to_owned()),
            "HOME" => Some("/home/ada".to_owned()),
            _ => None,
        };
        let found = candidates(variables, tree);
        let wheels: Vec<String> = found[2..].iter().map(Candidate::to_string).collect();
        let expected = [
            "/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2",
            "/venv/lib/python3.12/dist-packages/nvidia/nccl/lib/libnccl.so.2",
            "/home/ada/.local/lib/python3.9/site-packages/nvidia/nccl/lib/libnccl.so.2",
            "/home/ada/.local/lib/python3.9/dist-packages/nvidia/nccl/lib/libnccl.so.2",
        ];
        assert_eq!(wheels, expected);
    }
}
