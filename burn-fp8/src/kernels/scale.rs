use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{buffer, codec::magnitude_bits};
use crate::Fp8Format;

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
        buffer::floats(amax),
        buffer::whole(&output),
        format.max(),
        power_of_two,
    );
    output
}

#[cube(launch)]
fn scales_kernel(amax: &[f32], scale: &mut [f32], fp8_max: f32, #[comptime] power_of_two: bool) {
    let mut index = ABSOLUTE_POS;
    while index < scale.len() {
        scale[index] = scale_of(magnitude_bits(amax[index]), fp8_max, power_of_two);
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The scale for an amax, given by its bits.
#[cube]
pub(in crate::kernels) fn scale_of(amax: u32, fp8_max: f32, #[comptime] power_of_two: bool) -> f32 {
    let mut scale = 1.0f32;
    if amax > 0u32 && amax < 0x7F80_0000u32 {
        scale = bounded(fp8_max / f32::reinterpret(amax));
        if power_of_two {
            // Clears the mantissa.
            scale = f32::reinterpret(u32::reinterpret(scale) & 0xFF80_0000u32);
        }
    }
    scale
}

/// The quotient, with the largest f32 in place of an infinity.
#[cube]
pub(in crate::kernels) fn bounded(quotient: f32) -> f32 {
    let bits = u32::min(magnitude_bits(quotient), 0x7F7F_FFFFu32);
    f32::reinterpret(bits)
}
