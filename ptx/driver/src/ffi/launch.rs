//! Modules, kernels, and the tensor maps that they take.

use std::{
    ffi::{CStr, c_char, c_void},
    slice::from_raw_parts,
};

use ptx_machine::{TensorMap, Window};

use super::{Status, give, status};
use crate::gpu::{Error, Given, Gpu};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut u64, image: *const c_char) -> Status {
    // SAFETY: the runtimes that call this give PTX, which ends with a zero.
    let text = unsafe { CStr::from_ptr(image) };
    let loaded = match text.to_str() {
        Ok(ptx) if ptx.contains(".version") => Gpu::get().and_then(|mut gpu| gpu.load(ptx)),
        _ => Err(Error::InvalidPtx),
    };
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(module, loaded) }
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: u64) -> Status {
    status(Gpu::get().map(|mut gpu| gpu.unload(module)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut u64,
    module: u64,
    name: *const c_char,
) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    let name = unsafe { CStr::from_ptr(name) };
    let found = Gpu::get().and_then(|gpu| {
        let known = gpu.kernel(module)?.name.as_bytes() == name.to_bytes();
        known.then_some(module).ok_or(Error::NotFound)
    });
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(function, found) }
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(_: u64, _: i32, _: i32) -> Status {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetAttribute(value: *mut i32, _: i32, _: u64) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(value, Ok(64)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut i32,
    _: u64,
    _: i32,
    _: usize,
) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(blocks, Ok(1)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuOccupancyMaxActiveClusters(
    clusters: *mut i32,
    _: u64,
    _: *const c_void,
) -> Status {
    // SAFETY: as `cuda.h` requires of the caller.
    unsafe { give(clusters, Ok(66)) }
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    threads_x: u32,
    threads_y: u32,
    threads_z: u32,
    shared: u32,
    _: u64,
    parameters: *const *const u8,
    _: *const c_void,
) -> Status {
    status(Gpu::get().and_then(|mut gpu| {
        let kernel = gpu.kernel(function)?.clone();
        let given = kernel.parameter_sizes().enumerate();
        let given = given.map(|(index, (size, is_tensor_map))| {
            // SAFETY: as `cuda.h` requires of the caller, there is a pointer for each parameter, to as many bytes as it has.
            let bytes = unsafe { from_raw_parts(*parameters.add(index), size) };
            match is_tensor_map {
                true => Given::TensorMap(u64::from_le_bytes(bytes[..8].try_into().unwrap())),
                false => Given::Bytes(bytes.to_vec()),
            }
        });
        let given: Vec<_> = given.collect();
        let (grid, threads) = ([grid_x, grid_y, grid_z], [threads_x, threads_y, threads_z]);
        gpu.launch(function, grid, threads, shared as usize, &given)
    }))
}

/// The bytes of an element, by the number of `CUtensorMapDataType`: u8, u16, u32, i32, u64, i64, f16, f32, f64, bf16, and f32 in three more
/// ways.
const BYTES: [usize; 13] = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4];
const SWIZZLES: [u64; 4] = [0, 32, 64, 128];

/// Without interleaving, steps between elements, and NaN outside of a tensor: such maps are refused.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut u64,
    kind: u32,
    rank: u32,
    address: u64,
    sizes: *const u64,
    strides: *const u64,
    tile: *const u32,
    steps: *const u32,
    interleave: u32,
    swizzle: u32,
    _promotion: u32,
    fill: u32,
) -> Status {
    let element = BYTES.get(kind as usize).copied();
    let swizzle = SWIZZLES.get(swizzle as usize).copied();
    let (Some(element), Some(swizzle), 1..=5, 0, 0) = (element, swizzle, rank, interleave, fill)
    else {
        return Error::InvalidValue as Status;
    };
    let rank = rank as usize;
    // SAFETY: as `cuda.h` requires of the caller, there is one of each for a dimension, but a stride less.
    let (sizes, pitches, tile, steps) = unsafe {
        (
            from_raw_parts(sizes, rank).to_vec(),
            from_raw_parts(strides, rank - 1).to_vec(),
            from_raw_parts(tile, rank).to_vec(),
            from_raw_parts(steps, rank),
        )
    };
    let made = steps.iter().all(|step| *step == 1).then_some(TensorMap {
        address,
        element,
        sizes,
        pitches,
        tile,
        window: None,
        swizzle,
    });
    // SAFETY: as `cuda.h` requires of the caller: a map has 128 bytes.
    unsafe { give(map, added(made)) }
}

/// The same of windows, whose steps are those of the pixels.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn cuTensorMapEncodeIm2col(
    map: *mut u64,
    kind: u32,
    rank: u32,
    address: u64,
    sizes: *const u64,
    strides: *const u64,
    lower: *const i32,
    upper: *const i32,
    channels: u32,
    pixels: u32,
    steps: *const u32,
    interleave: u32,
    swizzle: u32,
    _promotion: u32,
    fill: u32,
) -> Status {
    let element = BYTES.get(kind as usize).copied();
    let swizzle = SWIZZLES.get(swizzle as usize).copied();
    let (Some(element), Some(swizzle), 3..=5, 0, 0) = (element, swizzle, rank, interleave, fill)
    else {
        return Error::InvalidValue as Status;
    };
    let rank = rank as usize;
    // SAFETY: as `cuda.h` requires of the caller, there is one of each for a dimension, but a stride less, and corners for all but the
    // channels and the images.
    let (sizes, pitches, lower, upper, steps) = unsafe {
        (
            from_raw_parts(sizes, rank).to_vec(),
            from_raw_parts(strides, rank - 1).to_vec(),
            from_raw_parts(lower, rank - 2).to_vec(),
            from_raw_parts(upper, rank - 2).to_vec(),
            from_raw_parts(steps, rank),
        )
    };
    let whole = steps[0] == 1 && steps[rank - 1] == 1;
    let made = whole.then_some(TensorMap {
        address,
        element,
        sizes,
        pitches,
        tile: vec![channels, pixels],
        window: Some(Window {
            lower,
            upper,
            steps: steps[1..rank - 1].to_vec(),
        }),
        swizzle,
    });
    // SAFETY: as `cuda.h` requires of the caller: a map has 128 bytes.
    unsafe { give(map, added(made)) }
}

/// The handle of a map, if it is one that may be.
fn added(map: Option<TensorMap>) -> Result<u64, Error> {
    match map.filter(|map| map.check().is_ok()) {
        Some(map) => Gpu::get().map(|mut gpu| gpu.add_tensor_map(map)),
        None => Err(Error::InvalidValue),
    }
}
