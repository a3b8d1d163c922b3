//! The device, and its context.

use std::ffi::{CStr, c_char, c_void};

use super::{Status, give, status};
use crate::{
    gpu::{Error, Gpu},
    model::{MEMORY, Model},
};

/// The only context.
const CONTEXT: usize = 16;

#[unsafe(no_mangle)]
extern "C" fn cuInit(_: u32) -> Status {
    match Model::chosen() {
        Ok(_) => 0,
        Err(reason) => {
            eprintln!("ptx-driver: {reason}");
            Error::InvalidDevice as Status
        }
    }
}

fn model() -> &'static Model {
    Model::chosen().expect("cuInit has checked it")
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(version, Ok(13_000)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut i32, number: i32) -> Status {
    let found = (number == 0).then_some(0).ok_or(Error::InvalidDevice);
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(device, found) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(count, Ok(1)) }
}

/// Writes a text with its zero, as much of it as there is room for.
///
/// # Safety
///
/// `to` is valid for writes of `length` bytes.
unsafe fn give_text(to: *mut c_char, length: i32, text: &str) -> Status {
    for at in 0..length.max(0) as usize {
        let byte = text.as_bytes().get(at).copied().unwrap_or(0);
        // SAFETY: as the caller promises.
        unsafe { to.add(at).write(byte as c_char) };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: i32, _: i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give_text(name, length, model().name) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, length: i32, _: i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give_text(id, length, "0000:00:05.0") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _: i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(uuid, Ok([7; 16])) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(bytes, Ok(MEMORY)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe {
        give(total, Ok(MEMORY));
        give(free, Gpu::get().map(|gpu| MEMORY - gpu.used().min(MEMORY)))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, _: i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(value, Ok(model().attribute(attribute))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, _: i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(context, Ok(CONTEXT)) }
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_: i32) -> Status {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(context, Ok(CONTEXT)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(device: *mut i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(device, Ok(0)) }
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(_: *const c_void) -> Status {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> Status {
    status(Gpu::get())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe {
        give(least, Ok(0));
        give(greatest, Ok(-5))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(_: Status, name: *mut *const c_char) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(name, Ok(c"an error of ptx-driver".as_ptr())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: Status, text: *mut *const c_char) -> Status {
    const TEXTS: [(Error, &CStr); 8] = [
        (Error::InvalidValue, c"invalid value"),
        (Error::OutOfMemory, c"out of memory"),
        (Error::InvalidDevice, c"invalid device"),
        (Error::InvalidPtx, c"PTX that ptx-machine does not know"),
        (Error::NotFound, c"not found"),
        (Error::IllegalAddress, c"illegal address"),
        (
            Error::LaunchFailed,
            c"a kernel failed on ptx-machine: see stderr",
        ),
        (Error::NotSupported, c"not supported by ptx-driver"),
    ];
    let found = TEXTS.iter().find(|(known, _)| *known as Status == error);
    let found = found.map_or(c"no error of ptx-driver", |(_, text)| text);
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(text, Ok(found.as_ptr())) }
}

/// NVRTC asks for it, and does without.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetExportTable(table: *mut *const c_void, _: *const c_void) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(table, Ok(std::ptr::null())) };
    Error::NotFound as Status
}

/// NVRTC asks for it, and does without.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    _: *const c_char,
    function: *mut *const c_void,
    _: i32,
    _: u64,
    _: *const c_void,
) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(function, Ok(std::ptr::null())) };
    Error::NotFound as Status
}

/// The same, without the last argument.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    function: *mut *const c_void,
    version: i32,
    flags: u64,
) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { cuGetProcAddress_v2(name, function, version, flags, std::ptr::null()) }
}
