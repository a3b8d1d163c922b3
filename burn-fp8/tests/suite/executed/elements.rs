//! Tensors of floats, and what floats and codes a tensor has.

use burn::tensor::{DType, FloatDType};
use burn_cubecl::{CubeDevice, cubecl::client::Client, tensor::CubeTensor};
use half::{bf16, f16};

use super::super::gpu::{elements, tensor};

/// A tensor of numbers that its dtype has, with gaps between rows.
pub(super) fn floats(
    client: &Client,
    numbers: &[f32],
    shape: &[usize],
    dtype: FloatDType,
) -> CubeTensor {
    tensor(client, &bytes(numbers, dtype), shape, dtype.into())
}

/// The same without gaps.
pub(super) fn packed_floats(
    client: &Client,
    numbers: &[f32],
    shape: &[usize],
    dtype: FloatDType,
) -> CubeTensor {
    let memory = client.create_from_slice(&bytes(numbers, dtype));
    let device = CubeDevice::Cpu(Default::default());
    CubeTensor::new_contiguous(client.clone(), device, shape.into(), memory, dtype.into())
}

fn bytes(numbers: &[f32], dtype: FloatDType) -> Vec<u8> {
    let each = numbers.iter();
    match dtype {
        FloatDType::F32 => each.flat_map(|x| x.to_le_bytes()).collect(),
        FloatDType::F16 => each.flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        FloatDType::BF16 => each
            .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
            .collect(),
        dtype => panic!("{dtype:?}"),
    }
}

/// The elements of a tensor of floats.
pub(super) fn numbers(tensor: &CubeTensor) -> Vec<f32> {
    match tensor.dtype {
        DType::F32 => elements(tensor)
            .into_iter()
            .map(f32::from_le_bytes)
            .collect(),
        DType::F16 => elements(tensor)
            .into_iter()
            .map(|x| f16::from_le_bytes(x).to_f32())
            .collect(),
        DType::BF16 => elements(tensor)
            .into_iter()
            .map(|x| bf16::from_le_bytes(x).to_f32())
            .collect(),
        dtype => panic!("{dtype:?}"),
    }
}

/// The elements of a tensor of codes.
pub(super) fn codes(tensor: &CubeTensor) -> Vec<u8> {
    elements(tensor)
        .into_iter()
        .map(u8::from_le_bytes)
        .collect()
}
