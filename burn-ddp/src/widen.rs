//! Casts 16-bit floats up for arithmetic that needs more precision or range.

use burn::tensor::{DType, FloatDType, Tensor};

/// Casts `f16` and `bf16` to `f32`; leaves wider types as they are.
pub(crate) fn widen<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}
