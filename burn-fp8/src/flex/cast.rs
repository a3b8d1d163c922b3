//! Casts between floats and codes.

use burn::backend::ops::FloatTensorOps;
use burn::tensor::FloatDType;
use burn_flex::{Flex, FlexTensor, Layout};
use burn_std::{Bytes, DType, Shape, bf16, f16};
use rayon::prelude::*;

use super::{CHUNK, scalar, tensor_f32};
use crate::Fp8Format;

/// See [`Fp8Ops::fp8_amax`](crate::Fp8Ops::fp8_amax).
pub(crate) fn amax(input: FlexTensor) -> FlexTensor {
    let input = input.to_contiguous();
    let bits = match input.dtype() {
        DType::F32 => slice::<f32>(&input).par_chunks(CHUNK).map(max_bits).max(),
        DType::BF16 => slice::<bf16>(&input).par_chunks(CHUNK).map(max_bits).max(),
        DType::F16 => slice::<f16>(&input).par_chunks(CHUNK).map(max_bits).max(),
        _ => return amax(Flex::float_cast(input, FloatDType::F32)),
    };
    tensor_f32(vec![f32::from_bits(bits.unwrap_or(0))], Shape::new([1]))
}

/// See [`Fp8Ops::fp8_quantize`](crate::Fp8Ops::fp8_quantize).
pub(crate) fn quantize(
    input: FlexTensor,
    scale: &FlexTensor,
    format: Fp8Format,
) -> (FlexTensor, FlexTensor) {
    let input = input.to_contiguous();
    let factor = scalar(scale);
    let (codes, amax) = match input.dtype() {
        DType::F32 => encode(slice::<f32>(&input), factor, format),
        DType::BF16 => encode(slice::<bf16>(&input), factor, format),
        DType::F16 => encode(slice::<f16>(&input), factor, format),
        _ => return quantize(Flex::float_cast(input, FloatDType::F32), scale, format),
    };
    let layout = Layout::contiguous(input.layout().shape().clone());
    let codes = FlexTensor::new(Bytes::from_bytes_vec(codes), layout, DType::U8);
    (codes, tensor_f32(vec![amax], Shape::new([1])))
}

/// [`Fp8Ops::fp8_dequantize`](crate::Fp8Ops::fp8_dequantize) with one scale.
pub(crate) fn dequantize(
    codes: FlexTensor,
    scale: &FlexTensor,
    format: Fp8Format,
    dtype: FloatDType,
) -> FlexTensor {
    let inverse = 1.0 / scalar(scale);
    let values = decode(&codes, &format.values().map(|value| value * inverse));
    Flex::float_cast(values, dtype)
}

/// Looks up the values of codes in a table, in f32. The layout stays: a transposed tensor is looked up in memory order. Of a part of
/// a tensor, only that part is looked up.
pub(crate) fn decode(codes: &FlexTensor, table: &[f32; 256]) -> FlexTensor {
    if codes.storage::<u8>().len() > codes.layout().num_elements() {
        return decode(&codes.to_contiguous(), table);
    }
    let storage = codes.storage::<u8>();
    let mut values = vec![0f32; storage.len()];
    values
        .par_chunks_mut(CHUNK)
        .zip(storage.par_chunks(CHUNK))
        .for_each(|(values, codes)| {
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = table[code as usize];
            }
        });
    FlexTensor::new(
        Bytes::from_elems(values),
        codes.layout().clone(),
        DType::F32,
    )
}

/// The codes of `input * scale` and the amax of `input`.
fn encode<T: Copy + Sync + Into<f32>>(
    input: &[T],
    scale: f32,
    format: Fp8Format,
) -> (Vec<u8>, f32) {
    let mut codes = vec![0u8; input.len()];
    let max = codes
        .par_chunks_mut(CHUNK)
        .zip(input.par_chunks(CHUNK))
        .map(|(codes, input)| match format {
            Fp8Format::E4M3 => encode_chunk(codes, input, |x| Fp8Format::E4M3.encode(x * scale)),
            Fp8Format::E5M2 => encode_chunk(codes, input, |x| Fp8Format::E5M2.encode(x * scale)),
        })
        .max();
    (codes, f32::from_bits(max.unwrap_or(0)))
}

fn encode_chunk<T: Copy + Sync + Into<f32>>(
    codes: &mut [u8],
    input: &[T],
    encode: impl Fn(f32) -> u8,
) -> u32 {
    let mut max = 0;
    for (code, &value) in codes.iter_mut().zip(input) {
        let value = value.into();
        *code = encode(value);
        max = max.max(magnitude_bits(value));
    }
    max
}

pub(super) fn max_bits<T: Copy + Sync + Into<f32>>(values: &[T]) -> u32 {
    values
        .iter()
        .map(|&value| magnitude_bits(value.into()))
        .max()
        .unwrap_or(0)
}

/// The bits of the magnitude. They are ordered like the magnitudes, with NaN above infinity.
fn magnitude_bits(value: f32) -> u32 {
    value.to_bits() & 0x7FFF_FFFF
}

fn slice<T: burn::tensor::Element + bytemuck::Pod>(tensor: &FlexTensor) -> &[T] {
    tensor
        .as_slice()
        .expect("a contiguous tensor of this dtype")
}
