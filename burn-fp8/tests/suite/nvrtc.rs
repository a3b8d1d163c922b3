//! NVIDIA's runtime compiler, if it is installed. `scripts/nvrtc` downloads it, with the disassembler. Without it, tests that
//! need it are skipped, unless `BURN_FP8_REQUIRE_NVRTC` is set: then they fail.

use std::{
    ffi::{CStr, CString},
    path::{Path, PathBuf},
};

use cudarc::nvrtc::{result, sys};

/// Called if something is not installed.
pub(crate) fn missing(what: &str) {
    assert!(
        std::env::var_os("BURN_FP8_REQUIRE_NVRTC").is_none(),
        "{what}, and BURN_FP8_REQUIRE_NVRTC is set (scripts/nvrtc downloads it)"
    );
    eprintln!("{what}: skipped (scripts/nvrtc downloads it)");
}

/// A folder with `include` and `bin`, if NVRTC can be loaded.
pub(crate) fn toolkit() -> Option<PathBuf> {
    // SAFETY: opens NVIDIA's library, if there is one.
    let present = unsafe { sys::is_culib_present() };
    let home = ["NVRTC_HOME", "CUDA_PATH"]
        .into_iter()
        .find_map(std::env::var_os)
        .map_or(PathBuf::from("/usr/local/cuda"), PathBuf::from);
    if !present || !home.join("include/cuda_fp16.h").exists() {
        missing("no NVRTC, or no headers of CUDA");
        return None;
    }
    Some(home)
}

/// The machine code for `architecture`, or NVRTC's errors.
pub(crate) fn cubin(source: &str, architecture: &str, toolkit: &Path) -> Result<Vec<u8>, String> {
    compile(source, &format!("sm_{architecture}"), toolkit, |program| {
        let mut size = 0;
        // SAFETY: the program was compiled for a real architecture, and the buffer has the size that was asked for first.
        unsafe {
            sys::nvrtcGetCUBINSize(program, &mut size).result().unwrap();
            let mut binary = vec![0u8; size];
            let to = binary.as_mut_ptr().cast();
            sys::nvrtcGetCUBIN(program, to).result().unwrap();
            binary
        }
    })
}

/// The PTX for `architecture`, which is what CubeCL loads.
pub(crate) fn ptx(source: &str, architecture: &str, toolkit: &Path) -> Result<String, String> {
    compile(
        source,
        &format!("compute_{architecture}"),
        toolkit,
        |program| {
            // SAFETY: the program was compiled, and its PTX ends with a zero.
            unsafe {
                let text = result::get_ptx(program).unwrap();
                CStr::from_ptr(text.as_ptr()).to_str().unwrap().to_string()
            }
        },
    )
}

fn compile<T>(
    source: &str,
    architecture: &str,
    toolkit: &Path,
    get: impl FnOnce(sys::nvrtcProgram) -> T,
) -> Result<T, String> {
    let source = CString::new(source).unwrap();
    let include = toolkit.join("include");
    let options = [
        format!("--gpu-architecture={architecture}"),
        format!("--include-path={}", include.display()),
        format!("--include-path={}", include.join("cccl").display()),
    ];
    let program = result::create_program(&source, None).unwrap();
    // SAFETY: the program is destroyed last.
    unsafe {
        let compiled = result::compile_program(program, &options);
        let log = result::get_program_log(program).unwrap();
        let log = CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned();
        let output = compiled.map_err(|_| log).map(|()| get(program));
        result::destroy_program(program).unwrap();
        output
    }
}
