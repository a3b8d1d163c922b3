//! The functions of the driver, and of NVRTC, that CubeCL's CUDA runtime calls, as NVIDIA's `cuda.h` and `nvrtc.h` declare them.
//!
//! Everything here is called through CUDA's API, whose callers promise what it requires: pointers that are valid for what is read and
//! written through them. A function that is missing here is one that the runtime has not needed.

mod device;
mod launch;
mod memory;
mod nvrtc;
mod stream;

use crate::gpu::Result;

/// A `CUresult`.
type Status = i32;

/// The status of a result.
fn status<T>(result: Result<T>) -> Status {
    result.map_or_else(|error| error as Status, |_| 0)
}

/// Writes a result through a pointer of the caller.
///
/// # Safety
///
/// `to` is valid for a write, or null.
unsafe fn give<T>(to: *mut T, result: Result<T>) -> Status {
    status(result.map(|value| {
        if !to.is_null() {
            // SAFETY: as the caller promises.
            unsafe { to.write(value) };
        }
    }))
}
