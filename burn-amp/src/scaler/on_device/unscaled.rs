//! [`DeviceUnscaled`].

use super::DeviceOptimizer;
use crate::scaler::clip;
use burn::{
    lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    module::Module,
    optim::GradientsParams,
    tensor::{Bool, DType, Tensor},
};
use burn_layer::{Factor, scale_gradients};

/// Gradients divided by the loss scale, of which only the device knows whether they overflowed. The counterpart of
/// [`Unscaled`](crate::Unscaled) for [`DeviceLossScaler`](super::DeviceLossScaler).
///
/// Two optimizers over one backward pass, each of which skips by itself:
///
/// ```
/// # use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Tensor}};
/// # use burn_amp::{DeviceOptimizer, DeviceSgdConfig, LossScalerConfig};
/// # let device = Device::flex().autodiff();
/// # let (mut a, mut b) = (LinearConfig::new(4, 2).init(&device), LinearConfig::new(2, 4).init(&device));
/// # let mut optim_a = DeviceOptimizer::from(DeviceSgdConfig::new().build());
/// # let mut optim_b = optim_a.clone();
/// # let mut scaler = LossScalerConfig::new().init_on(&device)?;
/// # let loss = b.forward(a.forward(Tensor::<2>::ones([1, 4], &device))).sum();
/// let mut grads = scaler.scale(loss).backward();
/// let of_a = scaler.unscale(GradientsParams::from_module(&mut grads, &a), &a);
/// let of_b = scaler.unscale(GradientsParams::from_module(&mut grads, &b), &b);
/// scaler.update(of_a.overflow().bool_or(of_b.overflow()));
/// a = of_a.step(&mut optim_a, 0.1, a);
/// b = of_b.step(&mut optim_b, 0.1, b);
/// # let _ = (a, b);
/// # Ok::<(), burn_amp::LossScalerError>(())
/// ```
#[derive(Debug)]
#[must_use = "unscaled gradients change nothing before a step"]
pub struct DeviceUnscaled {
    grads: GradientsParams,
    overflow: Tensor<1, Bool>,
    checked: bool,
}

impl DeviceUnscaled {
    pub(super) fn new(grads: GradientsParams, overflow: Tensor<1, Bool>) -> Self {
        Self {
            grads,
            overflow,
            checked: true,
        }
    }

    /// For a module without gradients.
    pub(super) fn unchecked(grads: GradientsParams, overflow: Tensor<1, Bool>) -> Self {
        Self {
            checked: false,
            ..Self::new(grads, overflow)
        }
    }

    /// Whether the module had gradients. The host knows this without waiting. Without gradients,
    /// [`overflow`](Self::overflow) is false and says nothing about the scale.
    pub fn checked(&self) -> bool {
        self.checked
    }

    /// Whether a gradient is not finite: one element, on the scaler's device.
    pub fn overflow(&self) -> Tensor<1, Bool> {
        self.overflow.clone()
    }

    /// Clips the gradients like [`Unscaled::clip_norm`](crate::Unscaled::clip_norm), on the device. The norm that they had before
    /// is a tensor of one element there; `None` without gradients.
    ///
    /// # Panics
    ///
    /// When `max_norm` is not positive.
    pub fn clip_norm<M: Module>(self, module: &M, max_norm: f64) -> (Self, Option<Tensor<1>>) {
        let (grads, norm) = clip::on_device(self.grads, module, max_norm);
        (Self { grads, ..self }, norm)
    }

    /// Changes the gradients. They are not checked again.
    pub fn map(self, change: impl FnOnce(GradientsParams) -> GradientsParams) -> Self {
        Self {
            grads: change(self.grads),
            ..self
        }
    }

    /// Skips the step if `any_rank`, one element, is true: the largest
    /// [`overflow`](Self::overflow) of all ranks, from an all-reduce on the device. Pass it to
    /// [`DeviceLossScaler::update`](super::DeviceLossScaler::update) too.
    pub fn agree(self, any_rank: Tensor<1, Bool>) -> Self {
        let any_rank = any_rank.to_device(&self.overflow.device());
        Self {
            overflow: self.overflow.bool_or(any_rank),
            checked: true,
            ..self
        }
    }

    /// Steps the optimizer. If a gradient overflowed, the device leaves parameters and optimizer
    /// state as they are.
    pub fn step<M: Module>(
        self,
        optimizer: &mut DeviceOptimizer,
        lr: impl Into<ModuleLearningRate>,
        module: M,
    ) -> M {
        // If one gradient overflowed, all become NaN, which tells each parameter's optimizer to skip.
        let one = Tensor::<1>::ones([1], (&self.overflow.device(), DType::F32));
        let factor = Factor::device(one.mask_fill(self.overflow, f32::NAN));
        let grads = scale_gradients(self.grads, &module, factor);
        optimizer.step(lr, module, grads)
    }
}
