use burn::backend::TensorMetadata;
use burn::tensor::{DType, FloatDType};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use burn_std::Metadata;
use cubecl::prelude::*;

use super::{
    buffer,
    codec::{by_hand, decode_word, float_to},
    input,
};
use crate::Fp8Format;

/// [`Fp8Ops::fp8_dequantize`](crate::Fp8Ops::fp8_dequantize) with one scale.
///
/// Values have the layout of their codes. Moving codes would need 8-bit types, which WebGPU lacks, whereas Burn's own kernels
/// read floats by their strides.
pub(crate) fn dequantize(
    codes: CubeTensor,
    scale: CubeTensor,
    format: Fp8Format,
    dtype: FloatDType,
) -> CubeTensor {
    let (length, dtype) = (buffer::extent(&codes), DType::from(dtype));
    if length == 0 {
        return buffer::empty_floats(&codes, codes.shape(), dtype);
    }
    let client = codes.client.clone();
    let output = CubeTensor::new(
        client.clone(),
        client.empty(length * dtype.size()),
        Metadata::new(codes.shape(), codes.meta.strides.clone()),
        codes.device.clone(),
        dtype,
    );
    let (count, dim) = buffer::grid(&client, buffer::words(length));
    let vector = input::vector(&output, length);
    dequantize_kernel::launch(
        &client,
        count,
        dim,
        vector,
        buffer::code_words(&codes),
        buffer::scalar(scale),
        buffer::array(
            output.handle.clone(),
            length / vector,
            vector * output.dtype.size(),
        ),
        format,
        by_hand(&client, output.dtype),
        dtype_to_storage_type(output.dtype),
    );
    output
}

/// Each unit decodes one word at a time.
#[cube(launch)]
fn dequantize_kernel<F: Numeric, N: Size>(
    codes: &[u32],
    scale: &[f32],
    output: &mut [Vector<F, N>],
    #[comptime] format: Fp8Format,
    #[comptime] by_hand: bool,
    #[define(F)] _dtype: ElemType,
) {
    let size = N::value();
    let inverse = 1.0f32 / scale[0];
    let mut word = ABSOLUTE_POS;
    while word < codes.len() {
        let values = decode_word(codes[word], format);
        if comptime!(size == 4) {
            let mut four = Vector::<F, N>::cast_from(0.0f32);
            #[unroll]
            for lane in 0..4usize {
                four.insert(lane, float_to::<F>(values.extract(lane) * inverse, by_hand));
            }
            output[word] = four;
        } else {
            #[unroll]
            for lane in 0..4usize {
                let index = 4 * word + lane;
                if index < output.len() {
                    let value = float_to::<F>(values.extract(lane) * inverse, by_hand);
                    output[index] = Vector::new(value);
                }
            }
        }
        word += CUBE_COUNT * CUBE_DIM as usize;
    }
}
