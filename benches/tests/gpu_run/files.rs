//! Files that programs and kernels need, and those that are kept.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use super::machine::{Machine, PASSES, write_empty, write_program};

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
fn kernels_that_were_compiled_beforehand_are_taken() {
    let takes = "cat .gpu/kernels/one && echo 'test result: ok. 1 passed; 0 failed'";
    let Some(machine) = Machine::new(&[("test-fp8", takes)]) else {
        return;
    };
    assert!(!machine.run(&[]).status.success());
    let root = machine.root.path();
    fs::create_dir_all(root.join("kernels")).unwrap();
    fs::write(root.join("kernels/one"), "compiled").unwrap();
    let packed = Command::new("tar")
        .args(["-cJf", ".gpu/gpu.compiled.txz", "kernels"])
        .current_dir(root)
        .status();
    assert!(packed.unwrap().success());
    assert!(machine.run(&[".gpu/gpu.tar.xz"]).status.success());
}

/// The database of CubeCL has both, and its kernels are kept if they are within the limits.
#[test]
fn what_was_tuned_is_kept_without_the_kernels() {
    let tunes = "python3 - <<'P'
import os, sqlite3
with sqlite3.connect('.gpu/kernels/default.db') as db:
    db.execute('create table entries (namespace text, key blob, value blob, origin integer)')
    kernel = os.urandom(2 << 20)
    db.executemany('insert into entries values (?, ?, ?, 0)', [('cuda/1', b'a', kernel), ('autotune/1', b'b', b'tuned')])
P
        echo 'test result: ok. 1 passed; 0 failed'";
    let Some(machine) = Machine::new(&[("test-fp8", tunes)]) else {
        return;
    };
    let out = machine.root.path().join(".gpu/out");
    let (tuned, all) = (
        "[('autotune/1', 5)]",
        "[('autotune/1', 5), ('cuda/1', 2097152)]",
    );
    for (limit, kept) in [
        (Some("COMPILED_MIB"), tuned),
        (Some("CARRIED_MIB"), tuned),
        (None, all),
    ] {
        let mut variables = vec![("LIMIT", "60")];
        variables.extend(limit.map(|limit| (limit, "1")));
        let output = machine.run_with(&variables, &[]);
        let printed = String::from_utf8_lossy(&output.stdout);
        let says_so = printed.contains("compiled.txz has what was tuned");
        assert_eq!(says_so, kept == tuned, "{printed}");
        let unpacked = Command::new("tar")
            .args(["-xJf", "compiled.txz"])
            .current_dir(&out)
            .status();
        assert!(unpacked.unwrap().success());
        let rows = "import sqlite3; print(sqlite3.connect('kernels/default.db').execute('select namespace, length(value) from entries order by 1').fetchall())";
        let rows = Command::new("python3")
            .args(["-c", rows])
            .current_dir(&out)
            .output()
            .unwrap();
        let rows = String::from_utf8_lossy(&rows.stdout).into_owned();
        assert_eq!(rows.trim(), kept);
    }
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
        cd \"${LD_LIBRARY_PATH%%:*}\" && ls libcublasLt.so libcudnn.so libnvrtc-builtins.so.13.0 &&
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
    write_empty(&site.join("nvidia/cudnn/lib/libcudnn.so.9"));
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
    // All are there, but of an old toolkit, or of one that is new enough.
    for (version, status) in [(12_030, 2), (12_040, 0)] {
        let define = format!("#define CUDA_VERSION {version}\n");
        fs::write(toolkit.join("include/cuda.h"), define).unwrap();
        let output = machine.run_with(&variables, &[]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{told}");
        assert_eq!(
            told.contains("12.4 or newer (this is 12030)"),
            status == 2,
            "{told}"
        );
    }
}
