//! `scripts/gpu-run` with programs that only print, and a driver that only has a name.

use serde_json::Value;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A checkout with the scripts and a pack of programs, given as what a shell is to run.
struct Machine {
    root: tempfile::TempDir,
}

fn write_program(path: &Path, body: &str) {
    fs::write(path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

impl Machine {
    /// `None`, with a message, where the script's own tools are missing.
    fn new(programs: &[(&str, &str)]) -> Option<Self> {
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
        for script in ["gpu-run", "gpu-summary"] {
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
            write_program(&gpu.join(name), body);
        }
        fs::write(gpu.join("root"), root.path().to_str().unwrap()).unwrap();
        fs::write(gpu.join("commit"), "0123456789").unwrap();
        let packed = Command::new("tar")
            .args(["-cJf", ".gpu/gpu.tar.xz", "-C", "pack", "gpu"])
            .current_dir(root.path())
            .status();
        assert!(packed.unwrap().success());
        Some(Self { root })
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let path = std::env::var("PATH").unwrap();
        let bin = self.root.path().join("bin");
        Command::new(self.root.path().join("scripts/gpu-run"))
            .args(arguments)
            .env("PATH", format!("{}:{path}", bin.display()))
            .env("LIMIT", "2s")
            .env_remove("OUT")
            .output()
            .unwrap()
    }

    fn results(&self) -> Value {
        let path = self.root.path().join(".gpu/out/results.json");
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root.path().join(path)).unwrap()
    }
}

const TABLE: &str = "cat <<'T'
What does it cost? (20 rounds)

| | median | ratio | middle half of the ratios |
|---|---|---|---|
| this | 1.500ms | 1.000 |  |
| that | 3.000ms | 2.000 | 1.900 to 2.100 |

Which kernels does it launch?

| kernel | plain f32 | autocast |
|---|---|---|
| Matmul<f32> | 3, 1.20ms | 0, 0.00ns |
T";

#[test]
fn what_programs_did_is_summed_up() {
    let passing =
        "echo 'test result: ok. 3 passed; 0 failed; 0 ignored'; echo 'skipped: no GPU' >&2";
    let programs = [
        ("test-fp8", passing),
        (
            "test-amp",
            "echo 'test result: FAILED. 1 passed; 2 failed; 0 ignored'; exit 101",
        ),
        ("test-slow", "sleep 60"),
        (
            "example-cifar_resnet_ddp",
            "echo 'Held-out accuracy  99.15 % (352 of 355 images)'",
        ),
        ("bench-gpu_fp8", TABLE),
    ];
    let Some(machine) = Machine::new(&programs) else {
        return;
    };
    let output = machine.run(&[]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("failed: test-amp test-slow"), "{printed}");

    let results = machine.results();
    let program = |name: &str| {
        let programs = results["programs"].as_array().unwrap().iter();
        programs
            .clone()
            .find(|program| program["name"] == name)
            .cloned()
            .unwrap()
    };
    let fp8 = program("test-fp8");
    assert_eq!((&fp8["passed"], &fp8["skipped"]), (&3.into(), &1.into()));
    assert_eq!(program("test-amp")["failed"], 2);
    assert_eq!(program("test-slow")["status"], 124);
    assert_eq!(program("example-bf16")["accuracy"][0], 99.15);
    assert_eq!(results["device"], "NVIDIA None, 1.2.3");
    let row = &results["benches"][1];
    assert_eq!(
        (&row["way"], &row["median"]),
        (&"that".into(), &"3.000ms".into())
    );
    assert_eq!(row["question"], "What does it cost? (20 rounds)");
    assert_eq!(row["middle half of the ratios"], "1.900 to 2.100");
    let row = &results["benches"][2];
    assert_eq!(
        (&row["way"], &row["plain f32"], &row["autocast"]),
        (
            &"Matmul<f32>".into(),
            &"3, 1.20ms".into(),
            &"0, 0.00ns".into()
        )
    );
    assert_eq!(row["question"], "Which kernels does it launch?");

    let results = machine.read("benches/RESULTS.md");
    assert!(
        results.starts_with("# Results\n") && results.contains("0123456789"),
        "{results}"
    );
    for line in [
        "| test-fp8 | 3 passed, 0 failed, 1 said that they were skipped |",
        "| test-slow | took too long |",
        "| that | 3.000ms | 2.000 | 1.900 to 2.100 |",
    ] {
        assert!(results.contains(line), "{results}");
    }
    assert!(machine.root.path().join(".gpu/out/logs.tar.gz").exists());
}

#[test]
fn parts_and_their_arguments_are_chosen() {
    let programs = [
        (
            "test-fp8",
            "echo \"test result: ok. $# passed; 0 failed\"; [ \"$7$8$9\" = coverageroutinesslow ]",
        ),
        (
            "bench-gpu_steps",
            "[ \"$2\" = vit_b_16/32 ] && [ \"$NCCL_MULTI_RANK_GPU_ENABLE\" = 1 ]",
        ),
        ("bench-gpu_fp8", "exit 3"),
    ];
    let Some(machine) = Machine::new(&programs) else {
        return;
    };
    let output = machine.run(&["test-fp8:routines:slow", "bench-gpu_steps:vit_b_16/32"]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}");
    assert_eq!(machine.results()["programs"].as_array().unwrap().len(), 2);

    let output = machine.run(&[".gpu", "everything"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no such part: everything"));
}
