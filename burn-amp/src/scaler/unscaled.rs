//! [`Unscaled`]: gradients that are divided by the scale and checked, before the optimizer's step.

use super::{Overflow, clip};
use burn::{
    module::Module,
    optim::{
        GradientsParams, ModuleOptimizer, lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    },
};

/// Gradients divided by the loss scale, for one step of one optimizer.
///
/// These are the gradients of the unscaled loss, so this is the place to [clip](Self::clip_norm) them, to add a penalty, or to
/// [agree](Self::agree) with other ranks. PyTorch tracks a state for each optimizer (ready, unscaled,
/// stepped). Here it is a type: `Unscaled` cannot be unscaled again,
///
/// ```compile_fail,E0308
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::Device};
/// use burn_amp::LossScalerConfig;
///
/// let model = LinearConfig::new(4, 2).init(&Device::flex());
/// let scaler = LossScalerConfig::new().init().unwrap();
/// let unscaled = scaler.unscale(GradientsParams::new(), &model);
/// scaler.unscale(unscaled, &model);
/// ```
///
/// and a step consumes it, so that there is no second step.
///
/// ```compile_fail,E0382
/// use burn::{nn::LinearConfig, optim::{GradientsParams, SgdConfig}, tensor::Device};
/// use burn_amp::LossScalerConfig;
///
/// let model = LinearConfig::new(4, 2).init(&Device::flex());
/// let mut optim = SgdConfig::new().init();
/// let scaler = LossScalerConfig::new().init().unwrap();
/// let unscaled = scaler.unscale(GradientsParams::new(), &model);
/// let (model, _) = unscaled.step(&mut optim, 0.1, model);
/// let (model, _) = unscaled.step(&mut optim, 0.1, model);
/// ```
#[derive(Debug)]
#[must_use = "unscaled gradients change nothing before a step"]
pub struct Unscaled {
    pub(super) grads: GradientsParams,
    pub(super) step: ScaledStep,
}

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a step that overflowed was skipped, and the scale is to be updated"]
pub struct ScaledStep {
    /// The number of the step, from 1: how often the scale is updated up to and including this step.
    pub step: u64,
    /// The scale that the step's loss was multiplied by.
    pub scale: f32,
    /// Whether the step says anything about the scale. `false` if the module had no gradient: then nothing was checked,
    /// and the scale is not updated. Always `true` if the scaler is disabled or the ranks [agreed](Unscaled::agree).
    pub checked: bool,
    /// The gradients that overflowed, if the step was skipped because of them.
    pub overflow: Option<Overflow>,
}

impl Unscaled {
    /// The gradients that overflowed, if any did.
    pub fn overflow(&self) -> Option<&Overflow> {
        self.step.overflow.as_ref()
    }

    /// The gradients of all parameters that have one.
    pub fn grads(&self) -> &GradientsParams {
        &self.grads
    }

    /// Scales the gradients down so that the Euclidean norm of all of them together is at most `max_norm`, and returns the norm
    /// that they had: PyTorch's `clip_grad_norm_` after `unscale_`. (The clipping of Burn's optimizers takes the norm of each
    /// gradient by itself.) The host waits for the device once, and also for each gradient if their squares overflow or
    /// underflow f32. If the step will be skipped because of an [overflow](Self::overflow), the gradients are left as they are,
    /// and NaN is returned as the norm, without waiting.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, optim::{GradientsParams, SgdConfig}, tensor::{Device, Tensor}};
    /// use burn_amp::LossScalerConfig;
    ///
    /// let device = Device::flex().autodiff();
    /// let mut model = LinearConfig::new(4, 1).with_bias(false).init(&device);
    /// let mut optim = SgdConfig::new().init();
    /// let mut scaler = LossScalerConfig::new().init()?;
    /// let loss = model.forward(Tensor::<2>::ones([1, 4], &device)).sum(); // four gradients of 1
    /// let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
    ///
    /// let (unscaled, norm) = scaler.unscale(grads, &model).clip_norm(&model, 1.0);
    /// assert_eq!(norm, 2.0);
    /// let step;
    /// (model, step) = unscaled.step(&mut optim, 0.1, model);
    /// scaler.update_after([&step])?;
    /// # let _ = model;
    /// # Ok::<(), burn_amp::LossScalerError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// When `max_norm` is not positive, or the device ended and its gradients cannot be read.
    pub fn clip_norm<M: Module>(self, module: &M, max_norm: f64) -> (Self, f64) {
        let step = self.step;
        let overflowed = step.overflow.is_some();
        let (grads, norm) = clip::on_host(self.grads, module, max_norm, overflowed);
        (Self { grads, step }, norm)
    }

    /// Changes the gradients. They are not checked again.
    pub fn map(self, change: impl FnOnce(GradientsParams) -> GradientsParams) -> Self {
        Self {
            grads: change(self.grads),
            step: self.step,
        }
    }

    /// Skips the step if any rank skips its own. `any_rank` is whether [`overflow`](Self::overflow)
    /// is `Some` on at least one rank. One all-reduce of one number finds that out, such as burn-ddp's
    /// `Ddp::all_reduce_any`. Pass it to `agree` on every rank: all ranks then step, or all skip and back
    /// off.
    ///
    /// Only needed if ranks hold different gradients (sharded ones, for instance). Averages of scaled
    /// gradients are the same on all ranks, so an infinity or a NaN of one rank is on every rank.
    pub fn agree(mut self, any_rank: bool) -> Self {
        self.step.checked = true;
        if any_rank {
            self.step.overflow.get_or_insert_default();
        }
        self
    }

    /// Steps the optimizer. If a gradient overflowed, neither module nor optimizer changes.
    ///
    /// Pass the [`ScaledStep`]s that this and the other optimizers' steps return to
    /// [`LossScaler::update_after`](super::LossScaler::update_after).
    pub fn step<M: Module>(
        self,
        optimizer: &mut ModuleOptimizer,
        lr: impl Into<ModuleLearningRate>,
        module: M,
    ) -> (M, ScaledStep) {
        let (grads, step) = self.into_parts();
        match step.overflow {
            None => (optimizer.step(lr, module, grads), step),
            Some(_) => (module, step),
        }
    }

    /// The gradients to step with, and the outcome of the check. If one overflowed, there are no gradients at
    /// all, so that any optimizer leaves every parameter and its state alone.
    pub fn into_parts(self) -> (GradientsParams, ScaledStep) {
        match self.step.overflow {
            None => (self.grads, self.step),
            Some(_) => (GradientsParams::new(), self.step),
        }
    }
}
