use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{buffer, codec::magnitude_bits};
use crate::{
    Fp8Format,
    recipe::{AmaxCompute, ScaleUpdate},
};

/// See [`Fp8Ops::fp8_scales`](crate::Fp8Ops::fp8_scales).
pub(crate) fn scales(amax: CubeTensor, format: Fp8Format, power_of_two: bool) -> CubeTensor {
    let output = buffer::empty_floats(&amax, amax.shape(), DType::F32);
    let length = output.shape().num_elements();
    if length == 0 {
        return output;
    }
    let client = amax.client.clone();
    let (count, dim) = buffer::grid(&client, length);
    scales_kernel::launch(
        &client,
        count,
        dim,
        buffer::elements(amax),
        buffer::raw(output.handle.clone(), length),
        format.max(),
        power_of_two,
    );
    output
}

#[cube(launch)]
fn scales_kernel(amax: &[f32], scale: &mut [f32], fp8_max: f32, #[comptime] power_of_two: bool) {
    let mut index = ABSOLUTE_POS;
    while index < scale.len() {
        let amax = amax[index];
        let bits = magnitude_bits(amax);
        if bits > 0u32 && bits < 0x7F80_0000u32 {
            let quotient = bounded(fp8_max / amax);
            if power_of_two {
                // Without its mantissa.
                scale[index] = f32::reinterpret(u32::reinterpret(quotient) & 0xFF80_0000u32);
            } else {
                scale[index] = quotient;
            }
        } else {
            scale[index] = 1.0f32;
        }
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The largest f32 instead of an infinity.
#[cube]
fn bounded(quotient: f32) -> f32 {
    let bits = u32::min(magnitude_bits(quotient), 0x7F7F_FFFFu32);
    f32::reinterpret(bits)
}

/// See [`Fp8Ops::fp8_update_scale`](crate::Fp8Ops::fp8_update_scale).
pub(crate) fn update_scale(
    history: CubeTensor,
    scale: CubeTensor,
    amax: CubeTensor,
    update: ScaleUpdate,
) -> (CubeTensor, CubeTensor) {
    let new_history = buffer::empty_floats(&history, history.shape(), DType::F32);
    let new_scale = buffer::empty_floats(&history, Shape::new([1]), DType::F32);
    let client = history.client.clone();
    update_kernel::launch(
        &client,
        CubeCount::new_single(),
        CubeDim::new_single(),
        buffer::elements(history),
        buffer::elements(scale),
        buffer::elements(amax),
        buffer::raw(
            new_history.handle.clone(),
            new_history.shape().num_elements(),
        ),
        buffer::raw(new_scale.handle.clone(), 1),
        update.fp8_max,
        2f32.powi(-update.margin),
        update.algorithm == AmaxCompute::Max,
    );
    (new_history, new_scale)
}

/// One unit, for a history is short. Comparisons are on bits: they put NaN above everything, fast-math or not.
#[cube(launch)]
#[allow(clippy::manual_memcpy, clippy::needless_range_loop)] // A kernel has neither.
fn update_kernel(
    history: &[f32],
    scale: &[f32],
    amax: &[f32],
    new_history: &mut [f32],
    new_scale: &mut [f32],
    fp8_max: f32,
    margin: f32,
    #[comptime] max: bool,
) {
    let length = history.len();
    let amax = amax[0];
    if magnitude_bits(amax) == 0u32 {
        for slot in 0..length {
            new_history[slot] = history[slot];
        }
        new_scale[0] = scale[0];
    } else {
        let mut window = magnitude_bits(amax);
        if max {
            for slot in 1..length {
                window = u32::max(window, magnitude_bits(history[slot]));
            }
        }
        for slot in 1..length {
            if slot + 1 < length {
                new_history[slot] = history[slot + 1];
            } else {
                new_history[slot] = amax;
            }
        }
        new_history[0] = 0.0f32;
        if window < 0x7F80_0000u32 {
            new_scale[0] = bounded(fp8_max / f32::reinterpret(window) * margin);
        } else {
            new_scale[0] = scale[0];
        }
    }
}
