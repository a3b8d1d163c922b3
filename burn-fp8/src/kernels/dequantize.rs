use burn::backend::TensorMetadata;
use burn::tensor::{DType, FloatDType};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use burn_std::Metadata;
use cubecl::{CubeKernel, client::Client, ir::types::Fp8Format as CubeFormat, prelude::*};

use super::{
    buffer,
    codec::{cube_format, float_to, load},
    definitions::define,
};
use crate::Fp8Format;

/// See [`Fp8Ops::fp8_dequantize`](crate::Fp8Ops::fp8_dequantize).
///
/// Values lie as their codes do: what moves bytes needs 8-bit types, which WebGPU lacks, and Burn's own kernels read floats
/// by their strides.
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
    let (count, dim) = buffer::grid(&client, length);
    dequantize_kernel::launch(
        &client,
        count,
        dim,
        buffer::code_words(&codes),
        buffer::scalar(scale),
        buffer::as_it_lies(&output),
        cube_format(format),
        output.dtype == DType::BF16,
        dtype_to_storage_type(output.dtype),
    );
    output
}

pub(super) fn definition(
    client: &Client,
    format: Fp8Format,
    dtype: ElemType,
    bf16: bool,
) -> KernelDefinition {
    let word = || buffer::word(client);
    let format = cube_format(format);
    define!(
        client,
        dequantize_kernel(word(), word(), word(), format, bf16, dtype)
    )
}

#[cube(launch, create_dummy_kernel)]
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
