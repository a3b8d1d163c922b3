//! Tests `scripts/gpu-run` with programs that only print, and a driver that is only a name.

use serde_json::Value;
use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, symlink},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

/// A checkout with the scripts, and a pack of programs, which are given as shell scripts.
struct Machine {
    root: tempfile::TempDir,
}

fn write_program(path: &Path, body: &str) {
    fs::write(path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn write_empty(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, "").unwrap();
}

const LIBDEVICE: &str = "cuda/nvvm/libdevice/libdevice.10.bc";
const PASSES: &str = "echo 'test result: ok. 1 passed; 0 failed'";

impl Machine {
    /// `None`, with a message, if tools that the script needs are missing.
    fn new(programs: &[(&str, &str)]) -> Option<Self> {
        Self::with_build("llvm", &[LIBDEVICE], programs)
    }

    /// A machine with a pack of this `build`, which also has the files of `files`.
    fn with_build(build: &str, files: &[&str], programs: &[(&str, &str)]) -> Option<Self> {
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
    fn pack_of(&self, checkout: &Path) {
        let root = self.root.path();
        fs::write(root.join("pack/gpu/root"), checkout.to_str().unwrap()).unwrap();
        let packed = Command::new("tar")
            .args(["-cJf", ".gpu/gpu.tar.xz", "-C", "pack", "gpu"])
            .current_dir(root)
            .status();
        assert!(packed.unwrap().success());
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.run_with(&[("LIMIT", "2")], arguments)
    }

    fn run_with(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
        self.script(variables, arguments).output().unwrap()
    }

    fn script(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Command {
        let path = std::env::var("PATH").unwrap();
        let bin = self.root.path().join("bin");
        let mut script = Command::new(self.root.path().join("scripts/gpu-run"));
        for variable in ["OUT", "TIME", "LIMIT", "CUDA_PATH"] {
            script.env_remove(variable);
        }
        script
            .args(arguments)
            .env("PATH", format!("{}:{path}", bin.display()))
            .envs(variables.iter().copied());
        script
    }

    /// The results of a program.
    fn program(&self, name: &str) -> Value {
        let results = self.results();
        let programs = results["programs"].as_array().unwrap().iter();
        programs
            .clone()
            .find(|program| program["name"] == name)
            .cloned()
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

- autocast failed: out of memory
T";

const GOALS: &str = "cat <<'T'
Which goals are met? a step

| | ratio | middle half | goal | outcome |
|---|---|---|---|---|
| memory | 0.500 |  | at most 0.600 | met |
| time | 1.500 | 1.400 to 1.600 | at most 1.020 | not judged: each by itself |
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
        ("bench-gpu_nccl", GOALS),
    ];
    let Some(machine) = Machine::new(&programs) else {
        return;
    };
    let output = machine.run(&[]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("failed: test-amp test-slow"), "{printed}");

    let results = machine.results();
    let program = |name: &str| machine.program(name);
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

    let row = &results["benches"][4];
    assert_eq!(row["outcome"], "not judged: each by itself");
    let goals = &program("bench-gpu_nccl")["goals"];
    assert_eq!(
        (&goals["met"], &goals["not judged"]),
        (&1.into(), &1.into())
    );

    let note = &results["notes"][0];
    assert_eq!(note["question"], "Which kernels does it launch?");
    assert_eq!(note["note"], "autocast failed: out of memory");

    let results = machine.read("benches/RESULTS.md");
    assert!(
        results.starts_with("# Results\n") && results.contains("0123456789"),
        "{results}"
    );
    for line in [
        "| test-fp8 | 3 passed, 0 failed, 1 said that they were skipped |",
        "| test-slow | took too long |",
        "| that | 3.000ms | 2.000 | 1.900 to 2.100 |",
        "| bench-gpu_nccl | goals: 1 met, 1 not judged |",
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

#[test]
fn what_was_ended_is_counted_as_far_as_it_came() {
    let ended = "printf 'running 4 tests\\ntest a::one ... ok\\ntest a::two - should panic ... ok\\ntest b ... FAILED\\ntest c ... '
        exec sleep 60";
    let Some(machine) = Machine::new(&[("test-fp8", ended)]) else {
        return;
    };
    machine.run(&[]);
    let fp8 = machine.program("test-fp8");
    assert_eq!((&fp8["passed"], &fp8["failed"]), (&2.into(), &1.into()));
    assert_eq!(fp8["running"].to_string(), r#"["c"]"#);
    let line = "| test-fp8 | 2 passed, 1 failed, ended in c, took too long |";
    let results = machine.read("benches/RESULTS.md");
    assert!(results.contains(line), "{results}");
}

#[test]
fn a_time_for_all_is_the_limit_of_each() {
    let programs = [
        // The first two print how many seconds they get.
        ("bench-gpu_steps", "echo \"- $BENCH_SECONDS s\""),
        ("bench-gpu_fp8", "echo \"- $BENCH_SECONDS s\""),
        ("bench-gpu_kernels", "sleep 60"),
    ];
    let Some(machine) = Machine::new(&programs) else {
        return;
    };
    let output = machine.run_with(&[("TIME", "2000"), ("LIMIT", "2")], &[]);
    assert_eq!(output.status.code(), Some(1));
    let ran = machine.results()["programs"].clone();
    let ran: Vec<&str> = ran
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["name"].as_str().unwrap())
        .collect();
    // The most important programs come first.
    assert_eq!(
        ran,
        ["bench-gpu_steps", "bench-gpu_fp8", "bench-gpu_kernels"]
    );
    assert_eq!(machine.program("bench-gpu_kernels")["status"], 124);

    let seconds = |variables: &[(&str, &str)]| {
        let parts = ["bench-gpu_steps", "bench-gpu_fp8"];
        assert!(machine.run_with(variables, &parts).status.success());
        let notes = machine.results()["notes"].clone();
        let notes = notes.as_array().unwrap().clone().into_iter();
        let seconds = notes.map(|note| {
            let note = note["note"].as_str().unwrap();
            note.trim_end_matches(" s").parse().unwrap()
        });
        seconds.collect::<Vec<u32>>()
    };
    let [steps, fp8] = seconds(&[("TIME", "2000")])[..] else {
        panic!("two benches")
    };
    // The first has half of the time, the second what is left.
    assert!(
        (900..=1000).contains(&steps) && (1800..2000).contains(&fp8),
        "{steps}, {fp8}"
    );
    assert_eq!(seconds(&[]), [2385, 285]);
    let output = machine.run_with(&[("TIME", "20")], &["bench-gpu_steps"]);
    assert_eq!(output.status.code(), Some(2));
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        printed.contains("bench-gpu_steps: no time is left"),
        "{printed}"
    );
}

#[test]
fn what_a_program_leaves_is_ended() {
    // Like a rank, the process leads a session of its own. It ignores all signals but SIGKILL.
    let leaves = "setsid sh -c \"trap '' TERM; echo \\$\\$; while :; do sleep 1; done\" >left &
        while [ ! -s left ]; do sleep 0.1; done
        echo 'test result: ok. 1 passed; 0 failed'";
    let Some(machine) = Machine::new(&[("test-ddp", leaves)]) else {
        return;
    };
    let output = machine.run_with(&[("LIMIT", "60")], &[]);
    assert!(output.status.success());
    let process = machine.read("left").trim().to_owned();
    let state = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The process is gone, or a zombie.
    assert!(state.is_empty() || state.contains(") Z "), "{state}");
}

#[test]
fn kernels_are_kept_for_another_machine() {
    let keeps = "grep -q 'cache = true' cubecl.toml && cat .gpu/kernels/one 2>/dev/null
        echo compiled >.gpu/kernels/one
        echo 'test result: ok. 1 passed; 0 failed'";
    let Some(machine) = Machine::new(&[("test-fp8", keeps)]) else {
        return;
    };
    let gpu = machine.root.path().join(".gpu");
    assert!(machine.run(&[]).status.success());
    assert!(!machine.root.path().join("cubecl.toml").exists());
    // Another machine has the checkout, the pack and the kernels.
    fs::rename(gpu.join("out/compiled.txz"), gpu.join("compiled.txz")).unwrap();
    fs::remove_dir_all(gpu.join("kernels")).unwrap();
    fs::remove_dir_all(gpu.join("out")).unwrap();
    assert!(machine.run(&[]).status.success());
    let log = Command::new("tar")
        .args(["-xzOf", "out/logs.tar.gz", "logs/test-fp8.out"])
        .current_dir(&gpu)
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&log.stdout).into_owned();
    assert!(log.starts_with("compiled\n"), "{log}");
}

#[test]
fn every_part_has_its_time() {
    let says = |line: &str| format!("echo \"{line} $BENCH_SECONDS\" >>seconds; {PASSES}");
    let (test, bench) = (says("test"), says("bench"));
    let programs = [
        ("test-amp", test.as_str()),
        ("test-fp8", PASSES),
        ("bench-gpu_fp8", bench.as_str()),
    ];
    let Some(machine) = Machine::new(&programs) else {
        return;
    };
    let sanitizer = machine.root.path().join("bin/compute-sanitizer");
    write_program(&sanitizer, &says("sanitizer"));
    assert!(machine.run_with(&[("TIME", "2015")], &[]).status.success());
    let told = machine.read("seconds");
    let told: Vec<(&str, u32)> = told
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(part, seconds)| (part, seconds.parse().unwrap()))
        .collect();
    let parts: Vec<&str> = told.iter().map(|(part, _)| *part).collect();
    assert_eq!(
        parts,
        ["test", "bench", "sanitizer", "sanitizer", "sanitizer"]
    );
    // Of 2000 s, the tests get at most two fifths (half of that if they do not run in parallel), then the bench two thirds, and
    // the three sanitizer runs share the rest. Each gets 15 s less, and less the time that has passed until then.
    for ((part, seconds), most) in told.iter().zip([800, 1333, 666, 1000, 2000]) {
        let least = if *part == "test" { most / 2 } else { most };
        assert!((least - 60..most).contains(seconds), "{told:?}");
    }
}

#[test]
fn an_interrupt_ends_everything() {
    let waits = "setsid sleep 60 & echo $! >left; echo $$ >own; sleep 60; echo >>left";
    let next = "echo >>left";
    let Some(machine) = Machine::new(&[("bench-gpu_steps", waits), ("bench-gpu_fp8", next)]) else {
        return;
    };
    let mut script = machine.script(&[], &[]);
    // A process group of its own, like a terminal's foreground. The programs that `timeout` starts are not in it.
    let mut script = script
        .process_group(0)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let own = machine.root.path().join("own");
    while fs::read_to_string(&own).unwrap_or_default().is_empty() {
        thread::sleep(Duration::from_millis(100));
        assert!(script.try_wait().unwrap().is_none(), "it ended by itself");
    }
    let group = format!("-{}", script.id());
    let sent = Command::new("kill")
        .args(["-s", "TERM", "--", &group])
        .status();
    assert!(sent.unwrap().success());
    assert_eq!(script.wait().unwrap().code(), Some(143));
    for process in [machine.read("left"), machine.read("own")] {
        let state = fs::read_to_string(format!("/proc/{}/stat", process.trim()));
        let state = state.unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "{state}");
    }
    assert!(!machine.root.path().join("cubecl.toml").exists());
}

#[test]
fn a_driver_that_does_not_work_says_why() {
    let Some(machine) = Machine::new(&[("test-amp", PASSES)]) else {
        return;
    };
    write_program(
        &machine.root.path().join("bin/nvidia-smi"),
        "echo 'no communication with the driver'; exit 9",
    );
    let output = machine.run(&[]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("no communication with the driver"), "{told}");
}

#[test]
fn tests_find_their_fixtures_or_are_left_out() {
    let Some(machine) = Machine::new(&[("test-amp", PASSES)]) else {
        return;
    };
    let root = machine.root.path();
    let built = root.join("where it was/built");
    let body = format!("cat '{}/fixture' && {PASSES}", built.display());
    write_program(&root.join("pack/gpu/test-fp8"), &body);
    fs::write(root.join("fixture"), "").unwrap();
    machine.pack_of(&built);
    for earlier in [None, Some("gone"), Some("benches")] {
        if let Some(earlier) = earlier {
            fs::remove_file(&built).unwrap();
            symlink(root.join(earlier), &built).unwrap();
        }
        assert!(machine.run(&["tests"]).status.success(), "{earlier:?}");
        assert_eq!(machine.program("test-fp8")["passed"], 1);
        assert_eq!(
            fs::canonicalize(&built).unwrap(),
            root.canonicalize().unwrap()
        );
    }
    // Nobody can create anything there.
    machine.pack_of(Path::new("/proc/nowhere/checkout"));
    let output = machine.run(&["tests"]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}");
    assert!(
        printed.contains("left out: test-fp8\neverything else passed"),
        "{printed}"
    );
    assert_eq!(machine.program("test-amp")["passed"], 1);
}

/// The launcher's folder is inside the root of the build, which must be a link, not a folder that was made for the launcher.
#[test]
fn the_launcher_and_the_fixtures_have_the_same_root() {
    let Some(machine) = Machine::new(&[("bin-burn-ddp", "echo launched")]) else {
        return;
    };
    let root = machine.root.path();
    let built = root.join("where it was/built");
    let launcher = built.join("target/release/burn-ddp");
    let launches = format!("'{}' && {PASSES}", launcher.display());
    let reads = format!("cat '{}/fixture' && {PASSES}", built.display());
    write_program(&root.join("pack/gpu/test-ddp"), &launches);
    write_program(&root.join("pack/gpu/test-fp8"), &reads);
    fs::write(root.join("pack/gpu/launcher"), launcher.to_str().unwrap()).unwrap();
    fs::write(root.join("fixture"), "").unwrap();
    machine.pack_of(&built);
    assert!(machine.run(&["tests"]).status.success());
    for test in ["test-ddp", "test-fp8"] {
        assert_eq!(machine.program(test)["passed"], 1, "{test}");
    }
    assert_eq!(
        fs::canonicalize(&built).unwrap(),
        root.canonicalize().unwrap()
    );
}

#[test]
fn a_pack_brings_what_pytorch_lacks() {
    let brings = ["cuda/include/crt/mma.h", "cuda/include/cccl/cuda/barrier"];
    let looks = "cd \"$CUDA_PATH/include\" && ls crt/mma.h cccl/cuda/barrier cuda_fp8.h &&
        cd \"${LD_LIBRARY_PATH%%:*}\" && ls libcublasLt.so libnvrtc-builtins.so.13.0 &&
        echo 'test result: ok. 1 passed; 0 failed'";
    let Some(machine) = Machine::with_build("cpp", &brings, &[("test-amp", looks)]) else {
        return;
    };
    let site = machine.root.path().join("site packages");
    for file in [
        "mma.h",
        "cuda_fp16.h",
        "cuda_bf16.h",
        "cuda_fp8.h",
        "cooperative_groups.h",
    ] {
        write_empty(&site.join("nvidia/cu13/include").join(file));
    }
    for library in [
        "libcublasLt.so.13",
        "libnvrtc.so.13",
        "libnvrtc-builtins.so.13.0",
    ] {
        write_empty(&site.join("nvidia/cu13/lib").join(library));
    }
    let variables = [("PYTHONPATH", site.to_str().unwrap())];
    assert!(machine.run_with(&variables, &[]).status.success());
    assert_eq!(machine.program("test-amp")["passed"], 1);
}

#[test]
fn a_pack_without_mathematical_functions_says_so() {
    let Some(machine) = Machine::with_build("llvm", &[], &[("test-amp", PASSES)]) else {
        return;
    };
    let triton = Command::new("python3")
        .args(["-c", "import triton"])
        .output();
    if triton.unwrap().status.success() {
        eprintln!("skipped: Triton has them here");
        return;
    }
    let nothing = machine.root.path().join("benches");
    let output = machine.run_with(&[("CUDA_PATH", nothing.to_str().unwrap())], &[]);
    assert_eq!(output.status.code(), Some(2));
    let told = String::from_utf8_lossy(&output.stderr);
    for what in ["libdevice.10.bc", "nvidia-nvvm"] {
        assert!(told.contains(what), "{told}");
    }
}

#[test]
fn headers_that_kernels_include_are_looked_for_first() {
    let Some(machine) = Machine::with_build("cpp", &[], &[("test-amp", PASSES)]) else {
        return;
    };
    let toolkit = machine.root.path().join("toolkit");
    let variables = [("CUDA_PATH", toolkit.to_str().unwrap()), ("LIMIT", "60")];
    let headers = [
        "mma.h",
        "crt/mma.h",
        "cuda_fp16.h",
        "cuda_bf16.h",
        "cuda_fp8.h",
        "cooperative_groups.h",
        "cccl/cuda/barrier",
    ];
    for (number, header) in headers.iter().enumerate() {
        let output = machine.run_with(&variables, &[]);
        assert_eq!(
            output.status.code(),
            Some(2),
            "without {:?}",
            &headers[number..]
        );
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains(header.trim_start_matches("cccl/")), "{told}");
        let header = toolkit.join("include").join(header);
        fs::create_dir_all(header.parent().unwrap()).unwrap();
        fs::write(header, "").unwrap();
    }
    assert!(machine.run_with(&variables, &[]).status.success());
}
