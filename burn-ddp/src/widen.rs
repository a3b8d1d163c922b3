//! 16-bit floats in arithmetic that needs more than they have.

use burn::tensor::{DType, FloatDType, Tensor};

/// The tensor in `f32`, or in its own type where that is as wide.
pub(crate) fn widen<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}
