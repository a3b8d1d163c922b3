//! NVRTC, as `nvrtc.h` declares it: the real one, at `PTX_DRIVER_NVRTC`, for what it has not compiled before.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    path::PathBuf,
    ptr::{null, null_mut},
    sync::LazyLock,
};

use libloading::Library;

use crate::cache::Key;

/// An `nvrtcResult`.
type Status = c_int;

/// `NVRTC_ERROR_INTERNAL_ERROR`.
const INTERNAL: Status = 11;

/// A program, which `nvrtcProgram` points to.
struct Program {
    source: CString,
    /// PTX, and its zero.
    ptx: Vec<u8>,
    /// What the compiler said, and its zero.
    log: Vec<u8>,
}

static NVRTC: LazyLock<Library> = LazyLock::new(|| {
    let path = std::env::var_os("PTX_DRIVER_NVRTC").unwrap_or("libnvrtc.so.13".into());
    // SAFETY: NVIDIA's library may be loaded at any time.
    unsafe { Library::new(&path) }
        .unwrap_or_else(|error| panic!("PTX_DRIVER_NVRTC is no NVRTC: {error}"))
});

/// Calls a function of NVRTC itself.
macro_rules! real {
    ($name:literal, $($argument:expr => $kind:ty),*) => {{
        type Function = unsafe extern "C" fn($($kind),*) -> Status;
        NVRTC.get::<Function>($name).map_or(INTERNAL, |function| function($($argument),*))
    }};
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> Status {
    // SAFETY: as `nvrtc.h` requires of the caller.
    unsafe { real!(b"nvrtcVersion", major => *mut c_int, minor => *mut c_int) }
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(status: Status) -> *const c_char {
    match status {
        0 => c"success".as_ptr(),
        _ => c"an error of NVRTC: see its log".as_ptr(),
    }
}

/// Programs that bring headers of their own are not known.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut Program,
    source: *const c_char,
    _name: *const c_char,
    headers: c_int,
    _: *const *const c_char,
    _: *const *const c_char,
) -> Status {
    if headers != 0 {
        return INTERNAL;
    }
    // SAFETY: as `nvrtc.h` requires of the caller.
    unsafe {
        let made = Program {
            source: CStr::from_ptr(source).to_owned(),
            ptx: Vec::new(),
            log: vec![0],
        };
        program.write(Box::into_raw(Box::new(made)));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut Program) -> Status {
    // SAFETY: as `nvrtc.h` requires of the caller: it is one that was created, and not destroyed before.
    unsafe {
        drop(Box::from_raw(*program));
        program.write(null_mut());
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCompileProgram(
    program: *mut Program,
    count: c_int,
    options: *const *const c_char,
) -> Status {
    // SAFETY: as `nvrtc.h` requires of the caller.
    let (program, options) = unsafe {
        let option = |index| {
            CStr::from_ptr(*options.add(index))
                .to_string_lossy()
                .into_owned()
        };
        (&mut *program, (0..count as usize).map(option))
    };
    // Lines of the source are of no use, and half of the PTX.
    let options: Vec<String> = options.filter(|option| option != "-lineinfo").collect();
    let mut version = (0, 0);
    // SAFETY: the pointers are to variables.
    unsafe { nvrtcVersion(&mut version.0, &mut version.1) };
    let source = program.source.to_string_lossy();
    let key = Key {
        version,
        source: &source,
        options: &options,
    };
    let folder = std::env::var_os("PTX_DRIVER_KERNELS").map(PathBuf::from);
    if let Some(ptx) = folder.as_ref().and_then(|folder| key.find(folder)) {
        program.ptx = ptx;
        return 0;
    }
    // SAFETY: the source and the options are there until the program is destroyed.
    let (status, ptx, log) = unsafe { compiled(&program.source, &options) };
    if let (0, Some(folder)) = (status, folder) {
        key.keep(&folder, &ptx);
    }
    (program.ptx, program.log) = (ptx, log);
    status
}

/// The status, PTX and log.
///
/// # Safety
///
/// [`NVRTC`] is NVIDIA's.
unsafe fn compiled(source: &CStr, options: &[String]) -> (Status, Vec<u8>, Vec<u8>) {
    // CUDA's headers, compiled once a process, are three quarters of the work.
    let ahead = [
        "--pch".into(),
        format!("--pch-dir={}", std::env::temp_dir().display()),
    ];
    let options: Vec<CString> = options
        .iter()
        .chain(&ahead)
        .map(|option| CString::new(&**option).expect("it was one"))
        .collect();
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program: *mut c_void = null_mut();
    let (mut ptx, mut log) = (Vec::new(), vec![0]);
    // SAFETY: as `nvrtc.h` declares them, with pointers to variables and to buffers of the sizes that were asked for.
    unsafe {
        let created = real!(b"nvrtcCreateProgram", &mut program => *mut *mut c_void, source.as_ptr() => *const c_char,
            null() => *const c_char, 0 => c_int, null() => *const *const c_char, null() => *const *const c_char);
        if created != 0 {
            return (created, ptx, log);
        }
        let status = real!(b"nvrtcCompileProgram", program => *mut c_void, options.len() as c_int => c_int,
            options.as_ptr() => *const *const c_char);
        let mut size = 0usize;
        if real!(b"nvrtcGetProgramLogSize", program => *mut c_void, &mut size => *mut usize) == 0
            && size > 0
        {
            log = vec![0; size];
            let _ =
                real!(b"nvrtcGetProgramLog", program => *mut c_void, log.as_mut_ptr() => *mut u8);
        }
        if status == 0
            && real!(b"nvrtcGetPTXSize", program => *mut c_void, &mut size => *mut usize) == 0
        {
            ptx = vec![0; size];
            let _ = real!(b"nvrtcGetPTX", program => *mut c_void, ptx.as_mut_ptr() => *mut u8);
        }
        let _ = real!(b"nvrtcDestroyProgram", &mut program => *mut *mut c_void);
        (status, ptx, log)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTXSize(program: *const Program, size: *mut usize) -> Status {
    // SAFETY: as `nvrtc.h` requires of the caller.
    unsafe { size.write((*program).ptx.len()) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTX(program: *const Program, to: *mut u8) -> Status {
    // SAFETY: as `nvrtc.h` requires of the caller: there is room for as much as the size says.
    unsafe { to.copy_from_nonoverlapping((*program).ptx.as_ptr(), (*program).ptx.len()) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLogSize(program: *const Program, size: *mut usize) -> Status {
    // SAFETY: as `nvrtc.h` requires of the caller.
    unsafe { size.write((*program).log.len()) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLog(program: *const Program, to: *mut u8) -> Status {
    // SAFETY: as `nvrtc.h` requires of the caller: there is room for as much as the size says.
    unsafe { to.copy_from_nonoverlapping((*program).log.as_ptr(), (*program).log.len()) };
    0
}
