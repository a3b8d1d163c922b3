//! What training loops do to all gradients of a module at once.

mod clip;
mod norm;
mod scale;

pub use clip::{MaxNorm, clip_gradient_norm};
pub use norm::{gradient_norm, gradient_norm_on_device};
pub use scale::{Factor, scale_gradients};

use burn::tensor::{DType, FloatDType, Tensor};

/// Casts `f16` and `bf16` to `f32`, for arithmetic that needs more precision or range.
fn widen<const D: usize>(gradient: Tensor<D>) -> Tensor<D> {
    match gradient.dtype() {
        DType::F16 | DType::BF16 => gradient.cast(FloatDType::F32),
        _ => gradient,
    }
}
