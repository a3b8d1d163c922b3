//! Decode both operands, multiply by Burn's own (tuned, tensor cores where there are any), scale afterwards.
//!
//! All codes are exact in bf16, so nothing is lost where the device multiplies that faster.

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{
    CubeBackend, CubeDevice,
    kernel::{cast, matmul as burn_matmul},
    ops::numeric::ones,
    tensor::CubeTensor,
};
use cubecl::prelude::*;

use super::{Product, routine::Routine};
use crate::{
    Bias,
    kernels::{
        amax::raise,
        buffer,
        codec::{float_to, magnitude_bits},
        dequantize,
    },
};

/// See [`MatmulRoutine::Decoded`](super::MatmulRoutine::Decoded).
pub(super) struct Decoded;

impl Routine for Decoded {
    fn matmul(&self, product: Product) -> CubeTensor {
        matmul(product)
    }
}

fn matmul(product: Product) -> CubeTensor {
    let Product {
        lhs,
        rhs,
        lhs_scale,
        rhs_scale,
        bias,
        spec,
        amax,
    } = product;
    let unit = || ones(lhs.device.clone(), [1].into(), DType::F32);
    let dtype = operand_dtype(&lhs.device);
    let left = dequantize(lhs.clone(), unit(), spec.lhs, dtype);
    let right = dequantize(rhs, unit(), spec.rhs, dtype);
    let sums = burn_matmul::matmul(left, right, None, Default::default(), DType::F32)
        .expect("Burn multiplies floats of any shape");

    let output = buffer::empty_floats(&sums, sums.shape(), DType::from(spec.output));
    let length = output.shape().num_elements();
    let (has_bias, bias) = match bias {
        Bias::None => (false, lhs_scale.clone()),
        Bias::Row(bias) => (true, cast(bias, DType::F32)),
    };
    let client = output.client.clone();
    let (count, dim) = buffer::grid(&client, length);
    scale_kernel::launch(
        &client,
        count,
        dim,
        buffer::elements(sums),
        buffer::elements(lhs_scale),
        buffer::elements(rhs_scale),
        buffer::elements(bias),
        buffer::raw(output.handle.clone(), length),
        buffer::amax(&client, &amax),
        has_bias,
        amax.is_some(),
        output.dtype == DType::BF16,
        dtype_to_storage_type(output.dtype),
    );
    output
}

/// Bf16 where the device computes with it; processors do so in f32.
fn operand_dtype(device: &CubeDevice) -> FloatDType {
    let processor = matches!(device, CubeDevice::Cpu(_));
    match !processor && CubeBackend::supports_dtype(device, DType::BF16) {
        true => FloatDType::BF16,
        false => FloatDType::F32,
    }
}

#[cube(launch)]
fn scale_kernel<F: Numeric>(
    sums: &[f32],
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    bias: &[f32],
    output: &mut [F],
    amax: &[Atomic<u32>],
    #[comptime] has_bias: bool,
    #[comptime] has_amax: bool,
    #[comptime] bf16: bool,
    #[define(F)] _dtype: ElemType,
) {
    let lhs_inverse = 1.0f32 / lhs_scale[0];
    let rhs_inverse = 1.0f32 / rhs_scale[0];
    let mut max = 0u32;
    let mut index = ABSOLUTE_POS;
    while index < output.len() {
        let mut value = sums[index] * lhs_inverse * rhs_inverse;
        if has_bias {
            value += bias[index % bias.len()];
        }
        let value = float_to::<F>(value, bf16);
        output[index] = value;
        if has_amax {
            max = u32::max(max, magnitude_bits(f32::cast_from(value)));
        }
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
    if has_amax {
        raise(amax, max);
    }
}
