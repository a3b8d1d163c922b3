use burn::backend::TensorMetadata;
use burn::tensor::{DType, FloatDType};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{kernel::into_contiguous, tensor::CubeTensor};
use cubecl::{ir::types::Fp8Format as CubeFormat, prelude::*};

use super::{
    buffer,
    codec::{cube_format, float_to, load},
};
use crate::Fp8Format;

/// See [`Fp8Ops::fp8_dequantize`](crate::Fp8Ops::fp8_dequantize).
pub(crate) fn dequantize(
    codes: CubeTensor,
    scale: CubeTensor,
    format: Fp8Format,
    dtype: FloatDType,
) -> CubeTensor {
    let codes = into_contiguous(codes);
    let output = buffer::empty_floats(&codes, codes.shape(), DType::from(dtype));
    let length = output.shape().num_elements();
    if length == 0 {
        return output;
    }
    let client = codes.client.clone();
    let (count, dim) = buffer::grid(&client, length);
    dequantize_kernel::launch(
        &client,
        count,
        dim,
        buffer::code_words(&codes),
        buffer::elements(scale),
        buffer::raw(output.handle.clone(), length),
        cube_format(format),
        output.dtype == DType::BF16,
        dtype_to_storage_type(output.dtype),
    );
    output
}

#[cube(launch)]
fn dequantize_kernel<F: Numeric>(
    codes: &[u32],
    scale: &[f32],
    output: &mut [F],
    #[comptime] format: CubeFormat,
    #[comptime] bf16: bool,
    #[define(F)] _dtype: ElemType,
) {
    let inverse = 1.0f32 / scale[0];
    let mut index = ABSOLUTE_POS;
    while index < output.len() {
        output[index] = float_to::<F>(load(codes, index, format) * inverse, bf16);
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
}
