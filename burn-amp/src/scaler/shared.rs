//! [`SharedLossScaler`]: a handle to a loss scaler, for several owners.

use super::{LossScaler, ScaledStep, saved_schedule::with_scaler, together::Together};
use burn::{
    lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler},
    module::Module,
    optim::{GradientsParams, ModuleOptimizer, MultiGradientsParams},
    tensor::Tensor,
};
use parking_lot::Mutex;
use std::sync::Arc;

/// A handle to a [`LossScaler`], which its clones share. It is for training loops that are not your own, such
/// as that of burn-train's `Learner`, which calls the model by reference.
///
/// Keep it in the model as a skipped field. `TrainStep::step` scales the loss, and the `Learner` calls
/// `TrainStep::optimize` with the gradients, accumulated ones too:
///
/// ```
/// use burn::{
///     lr_scheduler::module_lr_scheduler::ModuleLearningRate,
///     module::Module,
///     nn::Linear,
///     optim::{GradientsParams, ModuleOptimizer},
///     tensor::Tensor,
/// };
/// use burn_amp::SharedLossScaler;
/// use burn_train::{RegressionOutput, TrainOutput, TrainStep};
///
/// #[derive(Module, Debug)]
/// struct Net {
///     linear: Linear,
///     #[module(skip)]
///     scaler: SharedLossScaler,
/// }
///
/// impl TrainStep for Net {
///     type Input = Tensor<2>;
///     type Output = RegressionOutput;
///
///     fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
///         let output = self.linear.forward(batch.clone());
///         let loss = (output.clone() - batch.clone()).powi_scalar(2).mean();
///         let grads = self.scaler.scale(loss.clone()).backward();
///         TrainOutput::new(self, grads, RegressionOutput::new(loss, output, batch))
///     }
///
///     fn optimize(
///         self,
///         optim: &mut ModuleOptimizer,
///         lr: ModuleLearningRate,
///         grads: GradientsParams,
///     ) -> Self {
///         let scaler = self.scaler.clone();
///         scaler.step(optim, lr, self, grads).0
///     }
/// }
/// ```
///
/// A skipped field is not in the model's record. Use [`saved_with`](Self::saved_with) to have the scaler in the `Learner`'s
/// checkpoints; otherwise a resumed training begins at the initial scale again.
///
/// Do not use it with Burn's own data parallel strategy, where several copies of the model each call
/// `optimize`: their steps would adjust one scale several times. With burn-ddp's strategy, each rank has its
/// own scaler. Averages are the same on all ranks, so if `TrainStep::optimize` calls [`step`](Self::step), which gets the averages
/// of the scaled gradients, all ranks step or skip together. With [`gradients`](Self::gradients) they may not: see there.
#[derive(Clone, Debug)]
pub struct SharedLossScaler(Arc<Mutex<Shared>>);

#[derive(Debug)]
struct Shared {
    scaler: LossScaler,
    together: Together,
}

impl From<LossScaler> for SharedLossScaler {
    fn from(scaler: LossScaler) -> Self {
        let together = Together::default();
        Self(Arc::new(Mutex::new(Shared { scaler, together })))
    }
}

impl SharedLossScaler {
    /// Calls `act` with the scaler, for example to read, save or load its state. Other handles wait meanwhile.
    ///
    /// ```
    /// use burn_amp::{LossScalerConfig, SharedLossScaler};
    ///
    /// let scaler = SharedLossScaler::from(LossScalerConfig::new().init()?);
    /// let skipped = scaler.with(|scaler| scaler.state().skipped);
    /// assert_eq!(skipped, 0);
    /// # Ok::<(), burn_amp::LossScalerError>(())
    /// ```
    pub fn with<R>(&self, act: impl FnOnce(&mut LossScaler) -> R) -> R {
        act(&mut self.0.lock().scaler)
    }

    /// `schedule`, with this scaler's state in its record, which the `Learner` saves in every checkpoint and loads from there.
    /// Checkpoints of the schedule alone can be loaded too: then the scaler stays as it is, and the log says so.
    ///
    /// ```
    /// use burn::lr_scheduler::constant::ConstantLr;
    /// use burn_amp::{LossScalerConfig, SharedLossScaler};
    ///
    /// let config = LossScalerConfig::new();
    /// let scaler = SharedLossScaler::from(config.init()?);
    /// let schedule = scaler.saved_with(ConstantLr::new(1e-3)); // Learner::new(model, optim, schedule)
    /// scaler.with(|scaler| scaler.update(true)); // training
    /// let checkpoint = schedule.to_record();
    ///
    /// let resumed = SharedLossScaler::from(config.init()?);
    /// let schedule = resumed.saved_with(ConstantLr::new(1e-3)).load_record(checkpoint);
    /// # let _ = schedule;
    /// assert_eq!(resumed.current_scale(), 32768.0);
    /// # Ok::<(), burn_amp::LossScalerError>(())
    /// ```
    pub fn saved_with(&self, schedule: impl Into<ModuleLrScheduler>) -> ModuleLrScheduler {
        with_scaler(schedule.into(), self.clone())
    }

    /// Like [`LossScaler::current_scale`].
    pub fn current_scale(&self) -> f32 {
        self.with(|scaler| scaler.current_scale())
    }

    /// Like [`LossScaler::scale`].
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        self.with(|scaler| scaler.scale(loss))
    }

    /// Like [`LossScaler::step`].
    ///
    /// # Panics
    ///
    /// Like [`LossScaler::unscale`].
    pub fn step<M: Module>(
        &self,
        optimizer: &mut ModuleOptimizer,
        lr: impl Into<ModuleLearningRate>,
        module: M,
        grads: GradientsParams,
    ) -> (M, ScaledStep) {
        self.with(|scaler| scaler.step(optimizer, lr, module, grads))
    }

    /// Like [`step`](Self::step), with the gradients of several devices, which the `Learner` passes to
    /// `TrainStep::optimize_multi`. If one gradient overflows, the step is skipped for all devices. The host
    /// waits once for each device.
    ///
    /// # Panics
    ///
    /// Like [`LossScaler::unscale`].
    pub fn step_multi<M: Module>(
        &self,
        optimizer: &mut ModuleOptimizer,
        lr: impl Into<ModuleLearningRate>,
        module: M,
        grads: MultiGradientsParams,
    ) -> (M, ScaledStep) {
        self.with(|scaler| {
            let mut step = scaler.next_step();
            let mut unscaled = Vec::with_capacity(grads.grads.len());
            let none = grads.grads.iter().all(|(grads, _)| grads.is_empty());
            for (grads, device) in grads.grads {
                // A device may have none: that is worth no warning.
                if grads.is_empty() && !none {
                    unscaled.push((grads, device));
                    continue;
                }
                let (grads, part) = scaler.unscale(grads, &module).into_parts();
                step.checked |= part.checked;
                if let Some(part) = part.overflow {
                    let overflow = step.overflow.get_or_insert_default();
                    overflow.parameters.extend(part.parameters);
                }
                unscaled.push((grads, device));
            }
            scaler.update_with(&step);
            let grads = MultiGradientsParams { grads: unscaled };
            match step.overflow {
                None => (optimizer.step_multi(lr, module, grads), step),
                Some(_) => (module, step),
            }
        })
    }

    /// Does everything inside `TrainStep::step`: scales the loss, runs backward, unscales, and updates the scale.
    /// If a gradient overflowed, no gradients are returned at all, and an optimizer that is given
    /// none leaves every parameter and its state alone.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
    /// use burn_amp::{LossScalerConfig, SharedLossScaler};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = LinearConfig::new(4, 2).init(&device);
    /// let scaler = SharedLossScaler::from(LossScalerConfig::new().init()?);
    /// let loss = model.forward(Tensor::<2>::ones([1, 4], &device)).sum();
    /// let (grads, step) = scaler.gradients(loss, &model);
    /// assert!(step.overflow.is_none() && grads.len() == 2);
    /// # Ok::<(), burn_amp::LossScalerError>(())
    /// ```
    ///
    /// Several threads may call this at once, each with a loss of the same step, as burn-train's strategies for several devices
    /// do. The gradients of each loss are divided by the scale that the loss was multiplied by. All losses that were scaled
    /// between two updates count as one update, with an overflow if any of them overflows: the first to finish updates the
    /// scale, and one that overflows later replaces that update.
    ///
    /// With the `Learner`'s gradient accumulation, each loss is checked by itself, and one that
    /// overflows is missing from the sum. To skip the whole sum instead, call [`step`](Self::step) in `TrainStep::optimize`.
    ///
    /// Where several ranks average their gradients after backward, as with burn-ddp's `Ddp::new`, call `step` as well: here each
    /// rank checks its own gradients before they are averaged. One that overflows passes none on, which counts as zeros, while the
    /// others step, and its scale differs from theirs from then on. With burn-ddp's `Overlap` the gradients are averages when they
    /// are checked, except in a step that averages after backward, such as the one after a skipped one.
    ///
    /// # Panics
    ///
    /// Like [`LossScaler::unscale`].
    pub fn gradients<const D: usize, M: Module>(
        &self,
        loss: Tensor<D>,
        module: &M,
    ) -> (GradientsParams, ScaledStep) {
        let (loss, step) = self.with(|scaler| (scaler.scale(loss), scaler.next_step()));
        let grads = GradientsParams::from_grads(loss.backward(), module);
        let Shared { scaler, together } = &mut *self.0.lock();
        let parts = scaler.unscale_step(step, grads, module).into_parts();
        together.update(scaler, &parts.1);
        parts
    }
}
