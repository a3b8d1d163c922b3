//! Tests `scripts/gpu-compile` and its driver with programs that only ask.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use super::machine::{Machine, write_empty};

/// Compiles the pack of a machine. `None`, with a message, without a C compiler.
fn compile(machine: &Machine, programs: &[&str]) -> Option<Output> {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler on this machine");
        return None;
    }
    let nvrtc = machine.root.path().join("nvrtc");
    write_empty(&nvrtc.join("lib/libnvrtc.so.13"));
    let scripts = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../scripts");
    let mut script = Command::new(scripts.join("gpu-compile"));
    script
        .arg(machine.root.path().join(".gpu/gpu.tar.xz"))
        .args(programs)
        .env("NVRTC_HOME", nvrtc)
        .env("LIMIT", "60");
    Some(script.output().unwrap())
}

fn python(folder: &Path, program: &str) -> String {
    let output = Command::new("python3")
        .args(["-c", program])
        .current_dir(folder)
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What a program does of which `scripts/gpu-compile` should keep kernels.
const DATABASE: &str = "import os, sqlite3
os.makedirs('kernels', exist_ok=True)
db = sqlite3.connect('kernels/default.db')
db.execute('create table if not exists entries (namespace text, key blob, value blob, origin integer, primary key (namespace, key))')
add = lambda *row: db.execute('insert or replace into entries values (?, ?, ?, 0)', row)
";

/// As the documentation of CUDA's driver has them.
#[test]
fn the_driver_answers_as_a_gpu_does() {
    let asks = "cat >asks.py <<'P'
import ctypes, os, sqlite3
driver = ctypes.CDLL('libcuda.so.1')
number, name, pointer, wide = ctypes.c_int(), ctypes.create_string_buffer(64), ctypes.c_uint64(), ctypes.c_uint64
assert driver.cuInit(0) == 0 and driver.cuLaunchKernel() == 0
assert driver.cuDeviceGetCount(ctypes.byref(number)) == 0 and number.value == 1
assert driver.cuDeviceGet(ctypes.byref(number), 1) == 101
driver.cuDeviceGetName(name, 64, 0)
# The compute capability and the number of processors.
for attribute, value in (75, 9), (76, 0), (16, 132):
    driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
    assert number.value == value, attribute
assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(5000)) == 0
sent, back = ctypes.create_string_buffer(bytes(range(1, 51)) * 100, 5000), ctypes.create_string_buffer(5000)
driver.cuMemcpyHtoD_v2(pointer, sent, ctypes.c_size_t(5000))
driver.cuMemcpyDtoH_v2(back, pointer, ctypes.c_size_t(5000))
assert back.raw == sent.raw
assert driver.cuMemFree_v2(pointer) == 0
def encode(size, stride, box):
    sizes, strides, boxes = (wide * 2)(size, size), (wide * 1)(stride), (ctypes.c_uint * 2)(box, 8)
    return driver.cuTensorMapEncodeTiled(None, 0, 2, None, sizes, strides, boxes, None, 0, 0, 0, 0)
assert [encode(64, 64, 64), encode(512, 512, 256), encode(512, 512, 257), encode(64, 60, 64), encode(64, 64, 0)] == [0, 0, 1, 1, 1]
assert os.environ['BENCH_UNCHECKED'] and os.path.exists(os.environ['STAND_IN_NVRTC'])
assert open('cubecl.toml').read().count('cache = true') == 1
import database
database.add('cuda/1', name.value, b'')
database.db.commit()
P
cat >database.py <<'P'
DATABASE
P
python3 asks.py"
        .replace("DATABASE", DATABASE);
    let Some(machine) = Machine::with_build("cpp", &[], &[("bench-gpu_fp8", asks.as_str())]) else {
        return;
    };
    let Some(output) = compile(&machine, &[]) else {
        return;
    };
    let gpu = machine.root.path().join(".gpu");
    let log = fs::read_to_string(gpu.join("gpu.compiling/bench-gpu_fp8.log")).unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}\n{log}");
    assert!(
        printed.contains("bench-gpu_fp8: exit 0; 1 more kernels"),
        "{printed}\n{log}"
    );
}

/// Kernels of all programs are shipped, with what a GPU was measured by; what autotune found here is not, nor what was compiled for
/// another pack.
#[test]
fn kernels_are_shipped_with_what_a_gpu_found() {
    let adds = |kernel: &str| {
        format!(
            "python3 - <<'P'\n{DATABASE}add('cuda/1', {kernel:?}, b'')\nadd('autotune/here', 'b', b'')\ndb.commit()\nP"
        )
    };
    let lists = format!("case \"$*\" in *--list*) exit ;; esac\n{}", adds("test"));
    let programs = [("bench-gpu_fp8", adds("bench")), ("test-fp8", lists)];
    let programs = programs
        .each_ref()
        .map(|(name, body)| (*name, body.as_str()));
    let Some(machine) = Machine::with_build("cpp", &[], &programs) else {
        return;
    };
    let gpu = machine.root.path().join(".gpu");
    let found = format!("{DATABASE}add('autotune/gpu', 'a', b'')\nadd('cuda/1', 'other', b'')\ndb.commit()\nimport tarfile
with tarfile.open('compiled.txz', 'w:xz') as tar: tar.add('kernels')");
    python(&gpu, &found);
    fs::remove_dir_all(gpu.join("kernels")).unwrap();
    let shipped = || {
        let rows = "import sqlite3, tarfile; tarfile.open('gpu.compiled.txz').extractall()
rows = sqlite3.connect('kernels/default.db').execute('select namespace, key from entries order by 1, 2').fetchall()
print(*map(' '.join, rows), sep=', ', end='')";
        python(&gpu, rows)
    };
    let Some(output) = compile(&machine, &[]) else {
        return;
    };
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{printed}");
    assert_eq!(shipped(), "autotune/gpu a, cuda/1 bench, cuda/1 test");
    // One program alone, of another build.
    fs::remove_file(gpu.join("compiled.txz")).unwrap();
    fs::write(machine.root.path().join("pack/gpu/commit"), "other").unwrap();
    machine.pack_of(machine.root.path());
    let again = compile(&machine, &["test-fp8"]).unwrap();
    assert!(again.status.success());
    assert_eq!(shipped(), "cuda/1 test");
}

#[test]
fn what_cannot_be_compiled_says_why() {
    for (build, program, said) in [
        ("llvm", "bench-gpu_fp8", "only packs of gpu-pack --cpp"),
        (
            "cpp",
            "bench-gpu_steps",
            "bench-gpu_steps is not in gpu.tar.xz",
        ),
        ("cpp", "bench-gpu_fp8", "nothing was compiled"),
    ] {
        let programs = [("bench-gpu_fp8", "exit 0")];
        let Some(machine) = Machine::with_build(build, &[], &programs) else {
            return;
        };
        let Some(output) = compile(&machine, &[program]) else {
            return;
        };
        assert_eq!(output.status.code(), Some(1));
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains(said), "{told}");
    }
}
