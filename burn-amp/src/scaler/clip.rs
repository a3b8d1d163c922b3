//! Clips gradients by the norm of all of them together, as PyTorch's `clip_grad_norm_` does.

use super::gradients::{Factor, scale};
use burn::{module::Module, optim::GradientsParams, tensor::Tensor};
use burn_layer::{MaxNorm, gradient_norm, gradient_norm_on_device};

/// The clipped gradients, and the norm that they had before. The host waits once, and also for each gradient if squares
/// overflow or underflow f32. If the step is to be skipped (`overflowed`), the gradients are left as they are, and the norm
/// is NaN.
pub(super) fn on_host<M: Module>(
    grads: GradientsParams,
    module: &M,
    max_norm: f64,
    overflowed: bool,
) -> (GradientsParams, f64) {
    let max_norm = MaxNorm::new(max_norm);
    if overflowed {
        return (grads, f64::NAN);
    }
    let norm = gradient_norm(&grads, module).expect("gradients can be read");
    let grads = match max_norm.factor(norm) {
        Some(factor) => scale(grads, module, Factor::host(factor as f32)),
        None => grads,
    };
    (grads, norm)
}

/// The same without waiting.
pub(super) fn on_device<M: Module>(
    grads: GradientsParams,
    module: &M,
    max_norm: f64,
) -> (GradientsParams, Option<Tensor<1>>) {
    let max_norm = MaxNorm::new(max_norm);
    let Some(norm) = gradient_norm_on_device(&grads, module) else {
        return (grads, None);
    };
    let factor = max_norm.factor_on_device(norm.clone());
    (scale(grads, module, Factor::device(factor)), Some(norm))
}
