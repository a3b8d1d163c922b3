//! Memory of the GPU and of the host, and copies between them.

use std::{
    alloc::{Layout, alloc_zeroed},
    ffi::c_void,
    slice::{from_raw_parts, from_raw_parts_mut},
};

use super::{Status, give, status};
use crate::gpu::{Error, Gpu};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Status {
    let allocated = Gpu::get().and_then(|mut gpu| gpu.allocate(bytes));
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(address, allocated) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, bytes: usize, _: u64) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { cuMemAlloc_v2(address, bytes) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> Status {
    status(Gpu::get().and_then(|mut gpu| gpu.free(address)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, _: u64) -> Status {
    cuMemFree_v2(address)
}

/// Host memory is the process's own, and never returned: the runtime keeps little of it, for as long as it runs.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize) -> Status {
    let layout = Layout::from_size_align(bytes.max(1), 256).map_err(|_| Error::InvalidValue);
    // SAFETY: the layout is not empty.
    let memory = layout.map(|layout| unsafe { alloc_zeroed(layout) }.cast::<c_void>());
    let memory = memory.and_then(|memory| match memory.is_null() {
        true => Err(Error::OutOfMemory),
        false => Ok(memory),
    });
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(pointer, memory) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, _: u32) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { cuMemAllocHost_v2(pointer, bytes) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(_: *mut c_void) -> Status {
    0
}

/// # Safety
///
/// `to` is valid for writes of `bytes` bytes.
unsafe fn to_host(to: *mut u8, from: u64, bytes: usize) -> Status {
    status(Gpu::get().and_then(|mut gpu| {
        let read = gpu.read(from, bytes)?;
        // SAFETY: as the caller promises.
        unsafe { from_raw_parts_mut(to, bytes) }.copy_from_slice(&read);
        Ok(())
    }))
}

/// # Safety
///
/// `from` is valid for reads of `bytes` bytes.
unsafe fn to_device(to: u64, from: *const u8, bytes: usize) -> Status {
    // SAFETY: as the caller promises.
    let data = unsafe { from_raw_parts(from, bytes) };
    status(Gpu::get().and_then(|mut gpu| gpu.write(to, data)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { to_host(to, from, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, _: u64) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { to_host(to, from, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { to_device(to, from, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const u8,
    bytes: usize,
    _: u64,
) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { to_device(to, from, bytes) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _: u64) -> Status {
    status(Gpu::get().and_then(|mut gpu| {
        let read = gpu.read(from, bytes)?;
        gpu.write(to, &read)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, _: u64) -> Status {
    status(Gpu::get().and_then(|mut gpu| gpu.write(to, &vec![value; bytes])))
}

/// One side of `CUDA_MEMCPY2D`.
#[repr(C)]
struct Side {
    x: usize,
    y: usize,
    /// 1 is the host's memory, 2 the GPU's.
    kind: u32,
    host: *mut u8,
    device: u64,
    array: *mut c_void,
    pitch: usize,
}

impl Side {
    /// Where a row starts, from the beginning of the memory.
    fn row(&self, number: usize) -> usize {
        (self.y + number) * self.pitch + self.x
    }
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
struct Copy2d {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const Copy2d, _: u64) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    let copy = unsafe { &*copy };
    let (from, to) = (&copy.from, &copy.to);
    for row in 0..copy.height {
        let (start, end) = (from.row(row), to.row(row));
        let device = (from.device + start as u64, to.device + end as u64);
        // SAFETY: as `cuda.h` requires of the caller, for all rows.
        let done = unsafe {
            match (from.kind, to.kind) {
                (2, 1) => to_host(to.host.add(end), device.0, copy.width),
                (1, 2) => to_device(device.1, from.host.add(start), copy.width),
                (2, 2) => cuMemcpyDtoDAsync_v2(device.1, device.0, copy.width, 0),
                _ => Error::NotSupported as Status,
            }
        };
        if done != 0 {
            return done;
        }
    }
    0
}
