//! [`Unscaled`]: gradients that are divided by the scale and checked, not yet stepped with.

use super::{Overflow, clip};
use burn::{
    module::Module,
    optim::{
        GradientsParams, ModuleOptimizer, lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    },
};

/// Gradients divided by the loss scale, for one step of one optimizer.
///
/// They are gradients of the loss itself: the place to [clip](Self::clip_norm) them, to add a penalty, or to
/// [agree](Self::agree) with other ranks. What PyTorch keeps as a state per optimizer (ready,
/// unscaled, stepped) is a type here: `Unscaled` cannot be unscaled again,
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
/// and a step takes it away, so that there is no second one.
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

/// What became of a step.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a step that overflowed was skipped, and the scale is to be updated"]
pub struct ScaledStep {
    /// The number of the step, from 1: how often the scale is updated with it.
    pub step: u64,
    /// The scale that the step's loss had.
    pub scale: f32,
    /// Whether the step says anything about the scale. Not where the module had no gradient: nothing was checked then,
    /// and the scale is not updated. Always where the scaler is disabled or the ranks [agreed](Unscaled::agree).
    pub checked: bool,
    /// What overflowed, if the step was skipped for it.
    pub overflow: Option<Overflow>,
}

impl Unscaled {
    /// What overflowed, if anything did.
    pub fn overflow(&self) -> Option<&Overflow> {
        self.step.overflow.as_ref()
    }

    /// The gradients, of every parameter that has one.
    pub fn grads(&self) -> &GradientsParams {
        &self.grads
    }

    /// Scale the gradients down so that the Euclidean norm of all of them together is at most `max_norm`, and tell the norm
    /// that they had: PyTorch's `clip_grad_norm_` after `unscale_`. (The clipping of Burn's optimizers takes the norm of each
    /// gradient by itself.) The host waits for the device once, and for each gradient where squares are more or
    /// less than f32 has. Gradients that overflowed have a norm that is not finite,
    /// and their step is skipped all the same.
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
    /// When `max_norm` is not positive.
    pub fn clip_norm<M: Module>(self, module: &M, max_norm: f64) -> (Self, f64) {
        let (grads, norm) = clip::on_host(self.grads, module, max_norm);
        let step = self.step;
        (Self { grads, step }, norm)
    }

    /// Change the gradients. They are not checked again.
    pub fn map(self, change: impl FnOnce(GradientsParams) -> GradientsParams) -> Self {
        Self {
            grads: change(self.grads),
            step: self.step,
        }
    }

    /// Skip the step if some rank skips its own. `any_rank` is true where
    /// [`overflow`](Self::overflow) is something on at least one rank: one all-reduce of one number
    /// tells, such as burn-ddp's `Ddp::all_reduce_any`. Give it to `agree` on every rank, and all of
    /// them step or skip, and back off, together.
    ///
    /// Needed where ranks hold different gradients (sharded ones, for instance). Averages of scaled
    /// gradients are the same everywhere, and an infinity or a NaN of one rank is in everyone's.
    pub fn agree(mut self, any_rank: bool) -> Self {
        self.step.checked = true;
        if any_rank {
            self.step.overflow.get_or_insert_default();
        }
        self
    }

    /// Step the optimizer unless a gradient overflowed: then neither module nor optimizer changes.
    ///
    /// Then give what this and the other optimizers' steps returned to
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

    /// The gradients to step with, and what became of them: no gradients at all where one
    /// overflowed, so that any optimizer leaves every parameter and its state alone.
    pub fn into_parts(self) -> (GradientsParams, ScaledStep) {
        match self.step.overflow {
            None => (self.grads, self.step),
            Some(_) => (GradientsParams::new(), self.step),
        }
    }
}
