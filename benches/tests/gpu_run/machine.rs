//! A machine with a GPU, as far as the script can tell.

use serde_json::Value;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A checkout with the scripts, and a pack of programs, which are given as shell scripts.
pub(crate) struct Machine {
    pub(crate) root: tempfile::TempDir,
}

pub(crate) fn write_program(path: &Path, body: &str) {
    fs::write(path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

pub(crate) fn write_empty(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, "").unwrap();
}

pub(crate) const LIBDEVICE: &str = "cuda/nvvm/libdevice/libdevice.10.bc";
pub(crate) const PASSES: &str = "echo 'test result: ok. 1 passed; 0 failed'";

impl Machine {
    /// `None`, with a message, if tools that the script needs are missing.
    pub(crate) fn new(programs: &[(&str, &str)]) -> Option<Self> {
        Self::with_build("llvm", &[LIBDEVICE], programs)
    }

    /// A machine with a pack of this `build`, which also has the files of `files`.
    pub(crate) fn with_build(
        build: &str,
        files: &[&str],
        programs: &[(&str, &str)],
    ) -> Option<Self> {
        for tool in ["bash", "python3", "tar", "xz", "timeout"] {
            if Command::new(tool).arg("--version").output().is_err() {
                eprintln!("skipped: no {tool} on this machine");
                return None;
            }
        }
        let root = tempfile::tempdir().unwrap();
        let scripts = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../scripts");
        for folder in ["scripts", "benches", "bin", "pack/gpu", ".gpu"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        for script in ["gpu-run", "gpu-tests", "gpu-summary"] {
            fs::copy(
                scripts.join(script),
                root.path().join("scripts").join(script),
            )
            .unwrap();
        }
        fs::write(root.path().join("benches/RESULTS.md"), "# Results\n").unwrap();
        write_program(
            &root.path().join("bin/nvidia-smi"),
            "echo NVIDIA None, 1.2.3",
        );
        let gpu = root.path().join("pack/gpu");
        for (name, body) in programs {
            // Most say what a whole program of tests says, and list none.
            let lists = match body.contains("--list") {
                true => "",
                false => "case \"$*\" in *--list*) exit ;; esac\n",
            };
            write_program(&gpu.join(name), &format!("{lists}{body}"));
        }
        for file in files {
            write_empty(&gpu.join(file));
        }
        fs::write(gpu.join("commit"), "0123456789").unwrap();
        fs::write(gpu.join("build"), build).unwrap();
        let machine = Self { root };
        machine.pack_of(machine.root.path());
        Some(machine)
    }

    /// Packs the programs as if they were built in the checkout at this path.
    pub(crate) fn pack_of(&self, checkout: &Path) {
        let root = self.root.path();
        fs::write(root.join("pack/gpu/root"), checkout.to_str().unwrap()).unwrap();
        let packed = Command::new("tar")
            .args(["-cJf", ".gpu/gpu.tar.xz", "-C", "pack", "gpu"])
            .current_dir(root)
            .status();
        assert!(packed.unwrap().success());
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.run_with(&[("LIMIT", "2")], arguments)
    }

    pub(crate) fn run_with(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
        self.script(variables, arguments).output().unwrap()
    }

    pub(crate) fn script(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Command {
        let path = std::env::var("PATH").unwrap();
        let bin = self.root.path().join("bin");
        let mut script = Command::new(self.root.path().join("scripts/gpu-run"));
        for variable in [
            "OUT",
            "TIME",
            "LIMIT",
            "CUDA_PATH",
            "COMPILED_MIB",
            "CARRIED_MIB",
        ] {
            script.env_remove(variable);
        }
        script
            .args(arguments)
            .env("PATH", format!("{}:{path}", bin.display()))
            .envs(variables.iter().copied());
        script
    }

    /// The results of a program.
    pub(crate) fn program(&self, name: &str) -> Value {
        let results = self.results();
        let programs = results["programs"].as_array().unwrap().iter();
        programs
            .clone()
            .find(|program| program["name"] == name)
            .cloned()
            .unwrap()
    }

    pub(crate) fn results(&self) -> Value {
        let path = self.root.path().join(".gpu/out/results.json");
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    pub(crate) fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root.path().join(path)).unwrap()
    }
}
