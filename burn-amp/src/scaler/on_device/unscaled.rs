//! [`DeviceUnscaled`].

use super::DeviceOptimizer;
use crate::scaler::gradients::Factor;
use burn::{
    lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{Bool, Tensor},
};

/// Gradients divided by the loss scale, whose overflow only the device knows: what
/// [`Unscaled`](crate::Unscaled) is to `LossScaler`.
///
/// Two optimizers over one backward pass, each skipping by itself:
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
}

impl DeviceUnscaled {
    pub(super) fn new(grads: GradientsParams, overflow: Tensor<1, Bool>) -> Self {
        Self { grads, overflow }
    }

    /// Whether a gradient is not finite: one element.
    pub fn overflow(&self) -> Tensor<1, Bool> {
        self.overflow.clone()
    }

    /// Change the gradients, to clip them for instance. They are not checked again.
    pub fn map(self, change: impl FnOnce(GradientsParams) -> GradientsParams) -> Self {
        Self {
            grads: change(self.grads),
            ..self
        }
    }

    /// Skip the step where `any_rank`, one element, is true: the largest
    /// [`overflow`](Self::overflow) of all ranks, by an all-reduce on the device. Give it to
    /// [`DeviceLossScaler::update`](super::DeviceLossScaler::update) too.
    pub fn agree(self, any_rank: Tensor<1, Bool>) -> Self {
        Self {
            overflow: self.overflow.bool_or(any_rank),
            ..self
        }
    }

    /// Step the optimizer; where a gradient overflowed the device leaves parameters and optimizer
    /// state as they are.
    pub fn step<M: Module>(
        self,
        optimizer: &mut DeviceOptimizer,
        lr: impl Into<ModuleLearningRate>,
        module: M,
    ) -> M {
        let one = self.overflow.clone().float().ones_like();
        let mut mark = Mark {
            grads: self.grads,
            factor: Factor::device(one.mask_fill(self.overflow, f32::NAN)),
        };
        module.visit(&mut mark);
        optimizer.step(lr, module, mark.grads)
    }
}

/// Makes all gradients NaN if one overflowed, which tells each parameter's optimizer to skip.
struct Mark {
    grads: GradientsParams,
    factor: Factor,
}

impl ModuleVisitor for Mark {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            let grad = self.factor.times(grad);
            self.grads.register::<D>(param.id, grad);
        }
    }
}
