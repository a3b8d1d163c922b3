//! Streams, of which every one is idle between calls, and events.

use super::{Status, give, status};
use crate::gpu::{Error, Gpu};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut u64, _: u32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(stream, Gpu::get().map(|mut gpu| gpu.new_handle())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(stream: *mut u64, flags: u32, _: i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { cuStreamCreate(stream, flags) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(_: u64) -> Status {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(_: u64) -> Status {
    status(Gpu::get())
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(_: u64) -> Status {
    status(Gpu::get())
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(_: u64, _: u64, _: u32) -> Status {
    status(Gpu::get())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(_: u64, state: *mut i32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(state, Ok(0)) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(_: u64, _: i32) -> Status {
    Error::NotSupported as Status
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut u64, _: u32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(event, Gpu::get().map(|mut gpu| gpu.new_handle())) }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(_: u64) -> Status {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, _: u64) -> Status {
    status(Gpu::get().map(|mut gpu| gpu.record(event)))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(_: u64) -> Status {
    status(Gpu::get())
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(_: u64) -> Status {
    status(Gpu::get())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64) -> Status {
    let elapsed = Gpu::get().and_then(|gpu| gpu.elapsed([start, end]));
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(milliseconds, elapsed) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: u64, end: u64) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { cuEventElapsedTime(milliseconds, start, end) }
}
