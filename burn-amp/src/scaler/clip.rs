//! Clips gradients by the norm of all of them together, as PyTorch's `clip_grad_norm_` does.

use burn::{module::Module, optim::GradientsParams, tensor::Tensor};
use burn_layer::{Factor, MaxNorm, clip_gradient_norm, gradient_norm_on_device, scale_gradients};

/// The clipped gradients, and the norm that they had before. The host waits once, and also for each gradient if squares
/// overflow or underflow f32. If the step is to be skipped (`overflowed`), the gradients are left as they are, and the norm
/// is NaN.
pub(super) fn on_host<M: Module>(
    grads: GradientsParams,
    module: &M,
    max_norm: f64,
    overflowed: bool,
) -> (GradientsParams, f64) {
    if overflowed {
        MaxNorm::new(max_norm); // which checks it
        return (grads, f64::NAN);
    }
    clip_gradient_norm(grads, module, max_norm).expect("gradients can be read")
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
    let grads = scale_gradients(grads, module, Factor::device(factor));
    (grads, Some(norm))
}
