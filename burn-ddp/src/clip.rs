//! Clips gradients by their total norm.

use std::collections::HashSet;

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::Tensor,
};
use burn_layer::{MaxNorm, gradient_norm};

use crate::{DdpError, widen::widen};

/// Scales gradients down so that the Euclidean norm of all gradients together is at most `max_norm` (Pascanu et
/// al. 2013), and returns the norm before scaling, like PyTorch's `clip_grad_norm_`. (Burn's own clipping takes
/// the norm of each gradient by itself.)
///
/// Call it after [`Ddp::reduce_gradients`](crate::Ddp::reduce_gradients): all ranks then have the same
/// gradients, and each takes their norm without communication. These norms are equal where the ranks' devices are of
/// one kind and their sums are deterministic; elsewhere they may differ by rounding, and so may the parameters
/// ([`Ddp::check_replicas`](crate::Ddp::check_replicas) finds what drifts apart). Before it, a rank's gradients are not
/// those of the whole batch. The host waits for the device once, and once more for each gradient if the sum of
/// squares overflows or underflows `f32`, so that finite gradients always have a finite norm.
///
/// ```
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Tensor}};
/// use burn_ddp::clip_gradient_norm;
///
/// # fn main() -> Result<(), burn_ddp::DdpError> {
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(4, 1).with_bias(false).init(&device);
/// let loss = model.forward(Tensor::<2>::ones([1, 4], &device)).sum(); // four gradients of 1
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let (gradients, norm) = clip_gradient_norm(gradients, &model, 1.0)?;
/// assert_eq!(norm, 2.0);
/// # let _ = gradients;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`DdpError::Device`] when the norm cannot be read. An infinite or NaN norm is not an error, but the returned
/// gradients are not finite either: check the norm, or use a loss scaler, which skips such steps.
///
/// # Panics
///
/// Panics if `max_norm` is not positive.
pub fn clip_gradient_norm<M: Module>(
    gradients: GradientsParams,
    model: &M,
    max_norm: f64,
) -> Result<(GradientsParams, f64), DdpError> {
    let max_norm = MaxNorm::new(max_norm);
    let norm = gradient_norm(&gradients, model)?;
    let gradients = match max_norm.factor(norm) {
        Some(factor) => scale_gradients(gradients, model, factor),
        None => gradients,
    };
    Ok((gradients, norm))
}

/// Multiplies all gradients by a factor.
pub(crate) fn scale_gradients<M: Module>(
    gradients: GradientsParams,
    model: &M,
    factor: f64,
) -> GradientsParams {
    let mut scale = Scale {
        gradients,
        factor,
        seen: HashSet::new(),
    };
    model.visit(&mut scale);
    scale.gradients
}

struct Scale {
    gradients: GradientsParams,
    factor: f64,
    /// Parameters visited so far: one that is shared by several parts of the model is visited several times.
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.seen.insert(param.id)
            && let Some(gradient) = self.gradients.remove::<D>(param.id)
        {
            // In 16 bits, a small factor would lose precision or underflow to 0.
            let dtype = gradient.dtype();
            let gradient = widen(gradient).mul_scalar(self.factor).cast(dtype);
            self.gradients.register(param.id, gradient);
        }
    }
}
