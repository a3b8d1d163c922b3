//! [`LossScaler`]: PyTorch's dynamic loss scaling, with the extras of Apex and DeepSpeed.

use super::{LossScalerConfig, LossScalerError, Overflow, Unscaled, gradients};
use burn::{
    module::Module,
    optim::{
        GradientsParams, ModuleOptimizer, lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    },
    tensor::Tensor,
};
use serde::{Deserialize, Serialize};

/// Dynamic loss scaling around any Burn optimizer.
///
/// fp16 holds nothing smaller than 6e-8: small gradients vanish. So the loss is multiplied by a
/// scale before backward and the gradients are divided by it after. When one of them overflows,
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
/// To clip gradients, give the optimizer a clipping configuration: it clips what the scaler has
/// unscaled. To accumulate, add up the gradients of the scaled losses and call
/// [`step`](Self::step) once for all of them.
#[derive(Clone, Debug)]
pub struct LossScaler {
    config: LossScalerConfig,
    state: LossScalerState,
    warned: bool,
}

/// What a [`LossScaler`] remembers: save it with the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScalerState {
    /// The scale.
    pub scale: f32,
    /// Steps without overflow since the scale last changed.
    pub growth_tracker: u32,
    /// Overflows that are still borne before the scale falls, this one included.
    pub hysteresis_left: u32,
    /// Overflows in a row.
    pub overflows_in_a_row: u32,
    /// Steps taken.
    pub steps: u64,
    /// Steps skipped.
    pub skipped: u64,
}

/// What became of a step.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a step that overflowed was skipped"]
pub struct ScaledStep {
    /// The scale that the step's loss had.
    pub scale: f32,
    /// What overflowed, if the step was skipped for it.
    pub overflow: Option<Overflow>,
}

/// So many overflows in a row say that the scale is not the trouble.
const OVERFLOWS_WARNED: u32 = 20;

impl LossScaler {
    pub(super) fn new(config: LossScalerConfig) -> Self {
        let state = LossScalerState {
            scale: config.init_scale as f32,
            growth_tracker: 0,
            hysteresis_left: config.hysteresis,
            overflows_in_a_row: 0,
            steps: 0,
            skipped: 0,
        };
        Self {
            config,
            state,
            warned: false,
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

    /// The loss times the scale, to call `backward` on.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        if self.config.enabled {
            loss.mul_scalar(self.state.scale)
        } else {
            loss
        }
    }

    /// The gradients divided by the scale, and whether one overflowed. The host waits for the
    /// device once. Disabled, the gradients pass unchecked.
    pub fn unscale<M: Module>(&self, grads: GradientsParams, module: &M) -> Unscaled {
        if !self.config.enabled {
            return Unscaled {
                grads,
                overflow: None,
            };
        }
        gradients::unscale(grads, module, 1.0 / self.state.scale)
    }

    /// Unscale the gradients, step the optimizer unless one overflowed, and update the scale. On
    /// overflow neither the module nor the optimizer changes.
    pub fn step<M: Module>(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        lr: impl Into<ModuleLearningRate>,
        module: M,
        grads: GradientsParams,
    ) -> (M, ScaledStep) {
        let unscaled = self.unscale(grads, &module);
        let step = ScaledStep {
            scale: self.current_scale(),
            overflow: unscaled.overflow,
        };
        let module = match step.overflow {
            None => optimizer.step(lr, module, unscaled.grads),
            Some(_) => module,
        };
        self.update(step.overflow.is_some());
        (module, step)
    }

    /// Adjust the scale after a step that overflowed or not. [`step`](Self::step) does it; this is
    /// for loops that unscale by themselves, and for ranks that agree on what overflowed.
    pub fn update(&mut self, overflow: bool) {
        if !self.config.enabled {
            return;
        }
        self.state.steps += 1;
        if overflow {
            self.state.skipped += 1;
            self.state.overflows_in_a_row += 1;
        } else {
            self.state.overflows_in_a_row = 0;
        }
        if self.config.dynamic {
            if overflow {
                self.back_off()
            } else {
                self.grow()
            }
        }
        self.warn_if_falling();
    }

    fn back_off(&mut self) {
        self.state.growth_tracker = 0;
        if self.state.hysteresis_left > 1 {
            self.state.hysteresis_left -= 1;
            return;
        }
        let (min, _) = self.config.bounds();
        let scale = f64::from(self.state.scale) * self.config.backoff_factor;
        self.state.scale = (scale as f32).max(min);
    }

    fn grow(&mut self) {
        if self.config.consecutive_hysteresis {
            self.state.hysteresis_left = self.config.hysteresis;
        }
        self.state.growth_tracker += 1;
        if self.state.growth_tracker < self.config.growth_interval {
            return;
        }
        self.state.growth_tracker = 0;
        self.state.hysteresis_left = self.config.hysteresis;
        let (_, max) = self.config.bounds();
        let scale = (f64::from(self.state.scale) * self.config.growth_factor) as f32;
        if scale.is_finite() {
            // A first scale above the maximum stays where it is.
            self.state.scale = scale.min(max.max(self.state.scale));
        }
    }

    fn warn_if_falling(&mut self) {
        if !self.warned && self.state.overflows_in_a_row >= OVERFLOWS_WARNED {
            self.warned = true;
            log::warn!(
                "{OVERFLOWS_WARNED} steps in a row overflowed and the loss scale is {}: the loss \
                 itself is probably not finite. Look for a NaN in the data, lower the learning \
                 rate, or run the op that overflows in f32 (Policy::builder)",
                self.state.scale
            );
        }
    }

    /// Set the scale, keeping the growth tracker.
    ///
    /// # Errors
    ///
    /// When `scale` is not a finite number above 0.
    pub fn set_scale(&mut self, scale: f32) -> Result<(), LossScalerError> {
        if !(scale > 0.0 && scale.is_finite()) {
            return Err(LossScalerError::Invalid {
                what: "scale",
                expected: "a finite scale above 0",
                found: scale.into(),
            });
        }
        self.state.scale = scale;
        Ok(())
    }

    /// The configuration.
    pub fn config(&self) -> &LossScalerConfig {
        &self.config
    }

    /// The state, to be saved after [`step`](Self::step).
    pub fn state(&self) -> &LossScalerState {
        &self.state
    }

    /// Go on from a saved state.
    ///
    /// # Errors
    ///
    /// When the state's scale is not a finite number above 0.
    pub fn load_state(mut self, state: LossScalerState) -> Result<Self, LossScalerError> {
        self.set_scale(state.scale)?;
        self.state = state;
        Ok(self)
    }
}
