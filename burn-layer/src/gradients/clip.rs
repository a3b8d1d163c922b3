//! Clips gradients by the norm of all of them together.

use super::{Factor, gradient_norm, scale_gradients};
use burn::{module::Module, optim::GradientsParams, tensor::Tensor};
use burn_std::ExecutionError;

/// PyTorch adds this to the norm.
const EPSILON: f64 = 1e-6;

/// Scales gradients down so that the Euclidean norm of all gradients together is at most `max_norm` (Pascanu et
/// al. 2013), and returns the norm before scaling, like PyTorch's `clip_grad_norm_`. (Burn's own clipping takes
/// the norm of each gradient by itself.)
///
/// - With a loss scaler, clip what was unscaled: burn-amp's `Unscaled::clip_norm`.
/// - With several ranks, call it after burn-ddp's `Ddp::reduce_gradients`: before it, a rank's gradients are not those of
///   the whole batch. All ranks then have the same gradients, and each takes their norm without communication. These norms
///   are equal where the ranks' devices are of one kind and their sums are deterministic; elsewhere they may differ by
///   rounding, and so may the parameters (burn-ddp's `Ddp::check_replicas` finds what drifts apart).
///
/// The host waits for the device once, and once more for each gradient if the sum of squares overflows or underflows `f32`,
/// so that finite gradients always have a finite norm.
///
/// ```
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Tensor}};
/// use burn_layer::clip_gradient_norm; // burn-amp and burn-ddp have it, too
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(4, 1).with_bias(false).init(&device);
/// let loss = model.forward(Tensor::<2>::ones([1, 4], &device)).sum(); // four gradients of 1
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let (gradients, norm) = clip_gradient_norm(gradients, &model, 1.0)?;
/// assert_eq!(norm, 2.0);
/// # let _ = gradients;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// When a device cannot be read. An infinite or NaN norm is not an error, but the returned gradients are not finite either:
/// check the norm, or use a loss scaler, which skips such steps.
///
/// # Panics
///
/// When `max_norm` is not positive, or NaN.
pub fn clip_gradient_norm<M: Module>(
    gradients: GradientsParams,
    module: &M,
    max_norm: f64,
) -> Result<(GradientsParams, f64), ExecutionError> {
    let max_norm = MaxNorm::new(max_norm);
    let norm = gradient_norm(&gradients, module)?;
    let gradients = match max_norm.factor(norm) {
        Some(factor) => scale_gradients(gradients, module, Factor::host(factor)),
        None => gradients,
    };
    Ok((gradients, norm))
}

/// The largest norm that gradients may have, as PyTorch's `clip_grad_norm_` takes it.
///
/// ```
/// use burn_layer::MaxNorm;
///
/// let max = MaxNorm::new(1.0);
/// assert_eq!(max.factor(0.5), None);
/// assert!((max.factor(2.0).unwrap() - 0.5).abs() < 1e-6);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxNorm(f64);

impl MaxNorm {
    /// Gradients of a larger norm than this are to be scaled down to it.
    ///
    /// # Panics
    ///
    /// When `max_norm` is not positive, or NaN.
    pub fn new(max_norm: f64) -> Self {
        assert!(
            max_norm > 0.0,
            "the largest norm, {max_norm}, must be positive"
        );
        Self(max_norm)
    }

    /// The factor to multiply gradients of that norm by: PyTorch's `max_norm / (norm + 1e-6)`, if
    /// that is below 1. `None` leaves the gradients unchanged.
    pub fn factor(self, norm: f64) -> Option<f64> {
        let factor = self.0 / (norm + EPSILON);
        (factor < 1.0).then_some(factor)
    }

    /// The same factor on the device; 1 leaves the gradients unchanged.
    pub fn factor_on_device(self, norm: Tensor<1>) -> Tensor<1> {
        let factor = norm.add_scalar(EPSILON).recip();
        factor.mul_scalar(self.0).clamp_max(1.0)
    }
}
