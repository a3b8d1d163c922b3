//! [`LossScaler`]: PyTorch's dynamic loss scaling, with the extras of Apex and DeepSpeed.

use super::{
    LossScalerConfig, LossScalerError, LossScalerState, ScaleChange, ScaleHistory, ScaledStep,
    Unscaled, gradients, unchecked::Unchecked,
};
use burn::{
    lr_scheduler::{LrSchedulerRecord, module_lr_scheduler::ModuleLearningRate},
    module::Module,
    optim::{GradientsParams, ModuleOptimizer},
    tensor::Tensor,
};
use burn_layer::Factor;

/// Dynamic loss scaling around any Burn optimizer.
///
/// fp16 holds nothing smaller than 6e-8, so small gradients vanish. Therefore the loss is multiplied by a
/// scale before backward, and the gradients are divided by it afterwards. When a gradient overflows,
/// the whole step is skipped and the scale falls; after a while without overflow it grows. The
/// algorithm and its defaults are those of `torch.amp.GradScaler` (Micikevicius et al. 2017).
///
/// ```
/// use burn::{
///     nn::LinearConfig,
///     optim::{GradientsParams, SgdConfig},
///     tensor::{Device, Distribution, Tensor},
/// };
/// use burn_amp::{Autocast, LossScalerConfig};
///
/// let device = Autocast::fp16().device(Device::flex())?.autodiff();
/// let mut model = LinearConfig::new(4, 2).init(&device);
/// let mut optim = SgdConfig::new().init();
/// let mut scaler = LossScalerConfig::new().init()?;
///
/// let x = Tensor::<2>::random([8, 4], Distribution::Default, &device);
/// let loss = model.forward(x).powi_scalar(2).mean();
/// let grads = scaler.scale(loss).backward();
/// let grads = GradientsParams::from_grads(grads, &model);
/// let step;
/// (model, step) = scaler.step(&mut optim, 0.1, model, grads);
/// assert!(step.overflow.is_none());
/// # let _ = model;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// To clip by the norm of all gradients together, use [`Unscaled::clip_norm`]. To clip each gradient by itself, give the
/// optimizer a clipping configuration, which clips the unscaled gradients. To accumulate, add up the gradients of the scaled
/// losses and call [`step`](Self::step) once for all of them.
///
/// **In parts**, like `unscale_`, `step` and `update` in PyTorch: [`unscale`](Self::unscale) returns
/// [`Unscaled`], which can be clipped and agreed upon by ranks, and steps the optimizer. Several optimizers each skip
/// steps by themselves and share the scale, which [`update_after`](Self::update_after) adjusts once.
///
/// ```
/// # use burn::{nn::LinearConfig, optim::{GradientsParams, SgdConfig}, tensor::{Device, Tensor}};
/// # use burn_amp::LossScalerConfig;
/// # let device = Device::flex().autodiff();
/// # let (mut encoder, mut decoder) = (LinearConfig::new(4, 2).init(&device), LinearConfig::new(2, 4).init(&device));
/// # let (mut optim_e, mut optim_d) = (SgdConfig::new().init(), SgdConfig::new().init());
/// # let mut scaler = LossScalerConfig::new().init()?;
/// # let loss = decoder.forward(encoder.forward(Tensor::<2>::ones([1, 4], &device))).sum();
/// let mut grads = scaler.scale(loss).backward();
/// let grads_e = GradientsParams::from_module(&mut grads, &encoder);
/// let grads_d = GradientsParams::from_module(&mut grads, &decoder);
/// let (step_e, step_d);
/// (encoder, step_e) = scaler.unscale(grads_e, &encoder).step(&mut optim_e, 0.1, encoder);
/// (decoder, step_d) = scaler.unscale(grads_d, &decoder).step(&mut optim_d, 0.1, decoder);
/// scaler.update_after([&step_e, &step_d])?;
/// # let _ = (encoder, decoder);
/// # Ok::<(), burn_amp::LossScalerError>(())
/// ```
///
/// **L-BFGS** evaluates its closure many times in a step and carries curvature from one evaluation to the next,
/// so that a skipped evaluation has no meaning. PyTorch's scaler refuses closures too. Burn's
/// `LBFGS` is no `ModuleOptimizer`, so the compiler refuses it:
///
/// ```compile_fail,E0308
/// use burn::{nn::LinearConfig, optim::{GradientsParams, LBFGSConfig}, tensor::Device};
/// use burn_amp::LossScalerConfig;
///
/// let model = LinearConfig::new(4, 2).init(&Device::flex());
/// let mut optim = LBFGSConfig::new().init();
/// let mut scaler = LossScalerConfig::new().init().unwrap();
/// scaler.step(&mut optim, 0.1, model, GradientsParams::new());
/// ```
#[derive(Clone, Debug)]
pub struct LossScaler {
    config: LossScalerConfig,
    state: LossScalerState,
    history: ScaleHistory,
    warned: bool,
    unchecked: Unchecked,
}

/// After this many overflows in a row, the scale is not the cause, and the log warns.
const OVERFLOWS_WARNED: u32 = 20;

impl LossScaler {
    pub(super) fn new(config: LossScalerConfig) -> Self {
        let state = LossScalerState::new(&config);
        Self {
            history: ScaleHistory::new(0, state.scale),
            config,
            state,
            warned: false,
            unchecked: Unchecked::default(),
        }
    }

    /// The scale that the next loss is multiplied by; 1 when disabled.
    pub fn current_scale(&self) -> f32 {
        if self.config.enabled {
            self.state.scale
        } else {
            1.0
        }
    }

    /// The loss times the scale, to call `backward` on. Scale each of several losses.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        if self.config.enabled {
            loss.mul_scalar(self.state.scale)
        } else {
            loss
        }
    }

    /// Divides the gradients of `module` by the scale and checks whether one overflowed. The host waits
    /// for the device once, for all gradients together. If the scaler is disabled, the gradients pass unchecked,
    /// without waiting. Gradients of parameters that the module does not have are left out, and the log says so, once.
    ///
    /// The gradients are checked after the division: with a scale so small that it has no inverse, all of
    /// them overflow.
    ///
    /// # Panics
    ///
    /// When a gradient is f16, because unscaling would lose again what scaling saved. (PyTorch's scaler raises an error, too.)
    pub fn unscale<M: Module>(&self, grads: GradientsParams, module: &M) -> Unscaled {
        self.unscale_step(self.next_step(), grads, module)
    }

    /// The same for gradients of a loss that was scaled by the scale of `step`.
    pub(super) fn unscale_step<M: Module>(
        &self,
        mut step: ScaledStep,
        grads: GradientsParams,
        module: &M,
    ) -> Unscaled {
        if !self.config.enabled {
            return Unscaled { grads, step };
        }
        let pass = gradients::multiply(grads, module, Factor::host(f64::from(step.scale.recip())));
        self.unchecked.warn_of(&pass);
        step.checked = !pass.is_empty();
        step.overflow = pass.overflow();
        Unscaled {
            grads: pass.grads,
            step,
        }
    }

    /// The step that the next update is for, without overflow so far.
    pub(super) fn next_step(&self) -> ScaledStep {
        ScaledStep {
            step: self.state.steps + 1,
            scale: self.current_scale(),
            checked: !self.config.enabled,
            overflow: None,
        }
    }

    /// Unscales the gradients, steps the optimizer unless one overflowed, and updates the scale. On
    /// overflow neither the module nor the optimizer changes. If the module has none of the gradients, nothing changes,
    /// not even the scaler. PyTorch's scaler raises an error then, because the gradients nearly always belong to another module.
    ///
    /// Step a learning rate scheduler together with the optimizer: not if
    /// [`overflow`](ScaledStep::overflow) is `Some`.
    ///
    /// # Panics
    ///
    /// Like [`unscale`](Self::unscale).
    pub fn step<M: Module>(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        lr: impl Into<ModuleLearningRate>,
        module: M,
        grads: GradientsParams,
    ) -> (M, ScaledStep) {
        let (module, step) = self.unscale(grads, &module).step(optimizer, lr, module);
        self.update_with(&step);
        (module, step)
    }

    /// Adjusts the scale after a step, if the step says anything about it.
    pub(super) fn update_with(&mut self, step: &ScaledStep) {
        if step.checked {
            self.update(step.overflow.is_some());
        }
    }

    /// Adjusts the scale after the steps of one or more optimizers on one scale: it backs off if
    /// any of them overflowed. Call it once, after all these steps.
    ///
    /// # Errors
    ///
    /// When there is no step, or none whose module had gradients, and when a step was unscaled before the last update, or
    /// before the scale was [set](Self::set_scale).
    pub fn update_after<'a>(
        &mut self,
        steps: impl IntoIterator<Item = &'a ScaledStep>,
    ) -> Result<(), LossScalerError> {
        let next = self.next_step();
        let mut overflow = None;
        for step in steps {
            let (scale, current) = (step.scale, next.scale);
            if step.step != next.step {
                return Err(LossScalerError::Stale {
                    step: step.step,
                    scale,
                    next: next.step,
                    current,
                });
            }
            if scale != current {
                let step = step.step;
                return Err(LossScalerError::SetSince {
                    step,
                    scale,
                    current,
                });
            }
            if step.checked {
                *overflow.get_or_insert(false) |= step.overflow.is_some();
            }
        }
        self.update(overflow.ok_or(LossScalerError::NothingChecked)?);
        Ok(())
    }

    /// Adjusts the scale after a step. `overflow` is whether the step overflowed. [`step`](Self::step) calls
    /// this itself; it is public for training loops that detect overflows themselves.
    pub fn update(&mut self, overflow: bool) {
        if !self.config.enabled {
            return;
        }
        self.state.update(&self.config, overflow);
        self.history.push(ScaleChange {
            step: self.state.steps,
            scale: self.state.scale,
            overflow,
        });
        self.warn_if_falling(overflow);
    }

    /// Takes back the last update, before which the state was `before`, and updates again with `overflow`.
    pub(super) fn update_anew(&mut self, before: LossScalerState, overflow: bool) {
        self.history.take_back(self.state.steps);
        self.state = before;
        self.update(overflow);
    }

    fn warn_if_falling(&mut self, overflow: bool) {
        let falling =
            overflow && self.state.scale < 1.0 || self.state.overflows_in_a_row >= OVERFLOWS_WARNED;
        if !overflow && self.state.scale >= 1.0 {
            // What falls later is news again.
            self.warned = false;
        }
        if falling && !self.warned {
            self.warned = true;
            log::warn!(
                "{} of {} steps overflowed, the last {} in a row, and the loss scale is {}: the \
                 loss itself is probably not finite. Look for a NaN in the data, lower the \
                 learning rate, or run the op that overflows in f32 (Policy::builder); \
                 ScaledStep::overflow names the parameters",
                self.state.skipped,
                self.state.steps,
                self.state.overflows_in_a_row,
                self.state.scale
            );
        }
    }

    /// Sets the scale and keeps the growth tracker, like PyTorch's `update(new_scale)`. Call it between two steps,
    /// in place of [`update_after`](Self::update_after).
    ///
    /// # Errors
    ///
    /// When `scale` is not a finite number above 0.
    pub fn set_scale(&mut self, scale: f32) -> Result<(), LossScalerError> {
        self.state.scale = LossScalerState::valid_scale(scale)?;
        self.history.push(ScaleChange {
            step: self.state.steps,
            scale,
            overflow: false,
        });
        Ok(())
    }

    /// The configuration.
    pub fn config(&self) -> &LossScalerConfig {
        &self.config
    }

    /// The overflows and the changes of the scale since the scaler was created or loaded.
    pub fn history(&self) -> &ScaleHistory {
        &self.history
    }

    /// The state. Save it after [`step`](Self::step).
    pub fn state(&self) -> &LossScalerState {
        &self.state
    }

    /// Continues from a saved state.
    ///
    /// # Errors
    ///
    /// When the state's scale is not a finite number above 0.
    pub fn load_state(mut self, state: LossScalerState) -> Result<Self, LossScalerError> {
        self.set_scale(state.scale)?;
        self.history = ScaleHistory::new(state.steps, state.scale);
        self.state = state;
        Ok(self)
    }

    /// The state as a [record of Burn](LossScalerState::to_record).
    pub fn to_record(&self) -> LrSchedulerRecord {
        self.state.to_record()
    }

    /// Continues from a record that [`to_record`](Self::to_record) returned.
    ///
    /// ```
    /// use burn::lr_scheduler::LrSchedulerRecord;
    /// use burn_amp::LossScalerConfig;
    ///
    /// let config = LossScalerConfig::new();
    /// let scaler = config.init()?;
    /// let bytes = scaler.to_record().into_bytes()?;
    /// let loaded = config.init()?.load_record(&LrSchedulerRecord::from_bytes(bytes)?)?;
    /// assert_eq!(loaded.state(), scaler.state());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When the record is not that of a loss scaler, or its scale is not a finite number above 0.
    pub fn load_record(self, record: &LrSchedulerRecord) -> Result<Self, LossScalerError> {
        self.load_state(LossScalerState::from_record(record)?)
    }
}
