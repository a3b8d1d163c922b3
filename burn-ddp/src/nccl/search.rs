//! Where the library may be.

use std::path::{Path, PathBuf};

/// The variable that names the library's file.
pub(super) const VARIABLE: &str = "BURN_DDP_NCCL";

/// The library in a Python wheel of NVIDIA's, below `site-packages`.
const WHEEL: &str = "nvidia/nccl/lib/libnccl.so.2";

/// Files to try, in this order: the one that `BURN_DDP_NCCL` names and no other; what the system's
/// loader finds (`libnccl.so.2` comes with every installation, `libnccl.so` only with the one for
/// developers); the wheel in a Python environment, the user's or the system's packages.
///
/// `variable` reads the environment, `folders` lists the folders in a folder.
pub(super) fn candidates(
    variable: impl Fn(&str) -> Option<String>,
    folders: impl Fn(&Path) -> Vec<PathBuf>,
) -> Vec<PathBuf> {
    if let Some(path) = variable(VARIABLE) {
        return vec![path.into()];
    }
    let mut candidates: Vec<PathBuf> = ["libnccl.so.2", "libnccl.so"].map(PathBuf::from).into();
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
                candidates.push(python.join(packages).join(WHEEL));
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
        assert_eq!(candidates(named, none), [Path::new("/opt/libnccl.so.2")]);
    }

    #[test]
    fn the_loader_comes_before_wheels() {
        assert_eq!(
            candidates(|_| None, none),
            [Path::new("libnccl.so.2"), Path::new("libnccl.so")]
        );
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
        let wheels: Vec<&str> = found[2..].iter().filter_map(|path| path.to_str()).collect();
        let expected = [
            "/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2",
            "/venv/lib/python3.12/dist-packages/nvidia/nccl/lib/libnccl.so.2",
            "/home/ada/.local/lib/python3.9/site-packages/nvidia/nccl/lib/libnccl.so.2",
            "/home/ada/.local/lib/python3.9/dist-packages/nvidia/nccl/lib/libnccl.so.2",
        ];
        assert_eq!(wheels, expected);
    }
}
