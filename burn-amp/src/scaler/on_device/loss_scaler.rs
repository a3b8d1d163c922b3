//! [`DeviceLossScaler`].

use super::{DeviceOptimizer, DeviceUnscaled};
use crate::scaler::{
    LossScalerConfig, LossScalerError, LossScalerState, gradients, unchecked::Unchecked,
};
use burn::{
    lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    module::Module,
    optim::GradientsParams,
    tensor::{Bool, DType, Device, Int, Tensor, Transaction},
};
use burn_layer::Factor;

/// A [`LossScaler`](crate::LossScaler) on the device: the scale, the growth tracker and the decision
/// whether a step is taken are tensors there, and the host never waits for them.
///
/// ```
/// use burn::{
///     nn::LinearConfig,
///     optim::GradientsParams,
///     tensor::{Device, Distribution, Tensor},
/// };
/// use burn_amp::{Autocast, DeviceAdamConfig, DeviceOptimizer, LossScalerConfig};
///
/// let device = Autocast::fp16().device(Device::flex())?.autodiff();
/// let mut model = LinearConfig::new(4, 2).init(&device);
/// let mut optim = DeviceOptimizer::from(DeviceAdamConfig::new().build());
/// let mut scaler = LossScalerConfig::new().init_on(&device)?;
///
/// let x = Tensor::<2>::random([8, 4], Distribution::Default, &device);
/// let loss = model.forward(x).powi_scalar(2).mean();
/// let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
/// model = scaler.step(&mut optim, 1e-3, model, grads);
/// # let _ = model;
///
/// // Only this call waits.
/// assert_eq!(scaler.current_scale(), 65536.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// **Which optimizers.** Burn's own optimizers keep on the host what a skipped step must not change: Adam's bias
/// correction needs `AdaptiveMomentumState::time`, a `usize`, and the velocity of momentum is an `Option`, which is
/// `None` before the first step, so that the first gradient is not dampened. Both depend on whether a step was
/// skipped, which a host that never waits does not know. So no code around such
/// an optimizer can be right. (PyTorch has the same two kinds: fused optimizers take `found_inf` as
/// a tensor; for all others its scaler waits.) [`DeviceOptimizer`] takes optimizers whose whole
/// state is on the device: [`DeviceSgd`](super::DeviceSgd), [`DeviceAdam`](super::DeviceAdam) and
/// others that [skip NaN](super::SkipsNan). Use Burn's own optimizers with `LossScaler`, which waits once per step
/// and gives the same parameters.
///
/// Growth and backoff factors are applied in f32. Factors that f32 does not hold exactly, such as 0.7, give scales that differ
/// in the last place from `LossScaler`'s, which computes in f64.
///
/// **What the host does not know**, it cannot report: it names no parameters, does not warn of overflows, and keeps no
/// history. [`state`](Self::state) tells how many steps were skipped.
#[derive(Clone, Debug)]
pub struct DeviceLossScaler {
    config: LossScalerConfig,
    device: Device,
    scale: Tensor<1>,
    growth_tracker: Tensor<1, Int>,
    hysteresis_left: Tensor<1, Int>,
    overflows_in_a_row: Tensor<1, Int>,
    skipped: Tensor<1, Int>,
    steps: u64,
    unchecked: Unchecked,
}

impl DeviceLossScaler {
    pub(in crate::scaler) fn new(
        config: LossScalerConfig,
        state: &LossScalerState,
        device: &Device,
    ) -> Self {
        let device = device.clone().inner();
        let int = |value: u64| Tensor::from_data([value as i64], &device);
        Self {
            config,
            scale: Tensor::from_data([state.scale], (&device, DType::F32)),
            growth_tracker: int(state.growth_tracker.into()),
            hysteresis_left: int(state.hysteresis_left.into()),
            overflows_in_a_row: int(state.overflows_in_a_row.into()),
            skipped: int(state.skipped),
            steps: state.steps,
            unchecked: Unchecked::default(),
            device,
        }
    }

    /// The loss times the scale, to call `backward` on. The loss may be on any device.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        if !self.config.enabled {
            return loss;
        }
        let (device, dtype) = (loss.device().inner(), loss.dtype());
        let scale = self.scale.clone().to_device(&device);
        loss * scale.reshape([1; D]).cast(dtype)
    }

    /// Divides the gradients of `module` by the scale and checks, on the device, whether one overflowed. Gradients of
    /// parameters that the module does not have are left out, and the log says so, once.
    ///
    /// # Panics
    ///
    /// When a gradient is f16, like [`LossScaler::unscale`](crate::LossScaler::unscale).
    pub fn unscale<M: Module>(&self, grads: GradientsParams, module: &M) -> DeviceUnscaled {
        if !self.config.enabled {
            return DeviceUnscaled::new(grads, self.finite());
        }
        let factor = Factor::device(self.scale.clone().recip());
        let pass = gradients::multiply(grads, module, factor);
        self.unchecked.warn_of(&pass);
        match pass.probes() {
            Some(probes) => {
                let overflow = probes.sum().is_nan().to_device(&self.device);
                DeviceUnscaled::new(pass.grads, overflow)
            }
            None => DeviceUnscaled::unchecked(pass.grads, self.finite()),
        }
    }

    fn finite(&self) -> Tensor<1, Bool> {
        Tensor::from_data([false], &self.device)
    }

    /// Unscales the gradients, steps the optimizer unless one overflowed, and updates the scale, all
    /// on the device. On overflow, parameters and optimizer state keep their values. If the module has none of the gradients,
    /// the scaler keeps its state too.
    ///
    /// # Panics
    ///
    /// Like [`unscale`](Self::unscale).
    pub fn step<M: Module>(
        &mut self,
        optimizer: &mut DeviceOptimizer,
        lr: impl Into<ModuleLearningRate>,
        module: M,
        grads: GradientsParams,
    ) -> M {
        let unscaled = self.unscale(grads, &module);
        if unscaled.checked() {
            self.update(unscaled.overflow());
        }
        unscaled.step(optimizer, lr, module)
    }

    /// Adjusts the scale after one or more steps on one scale. `overflow`, one element, is true if any of
    /// them [overflowed](DeviceUnscaled::overflow). [`step`](Self::step) calls this itself. With
    /// several optimizers, call it if at least one of them [had gradients](DeviceUnscaled::checked).
    pub fn update(&mut self, overflow: Tensor<1, Bool>) {
        if !self.config.enabled {
            return;
        }
        let overflow = overflow.to_device(&self.device);
        self.steps += 1;
        let clean = overflow.clone().bool_not();
        self.skipped = self.skipped.clone() + overflow.clone().int();
        let in_a_row = self.overflows_in_a_row.clone().add_scalar(1);
        self.overflows_in_a_row = in_a_row.mask_fill(clean.clone(), 0);
        if self.config.dynamic {
            self.adjust(overflow, clean);
        }
    }

    /// [`LossScalerState::update`] without branches.
    fn adjust(&mut self, overflow: Tensor<1, Bool>, clean: Tensor<1, Bool>) {
        let config = &self.config;
        let (min, max) = config.bounds();
        let tracker = self.growth_tracker.clone().add_scalar(1);
        // The device counts in signed 32-bit numbers. No training takes that many steps.
        let interval = config.growth_interval.min(i32::MAX as u32);
        let full = tracker.clone().greater_equal_scalar(interval);
        let grows = full.clone().bool_and(clean.clone());
        let borne = self.hysteresis_left.clone().lower_equal_scalar(1);
        let falls = overflow.clone().bool_and(borne.clone());
        let spends = overflow.clone().bool_and(borne.bool_not());

        let fallen = self.scale.clone().mul_scalar(config.backoff_factor);
        let grown = self.scale.clone().mul_scalar(config.growth_factor);
        let can_grow = grows.clone().bool_and(grown.clone().is_finite());
        let least = self.scale.clone().clamp_max(min);
        let most = self.scale.clone().clamp_min(max);
        self.scale = self
            .scale
            .clone()
            .mask_where(falls, fallen.max_pair(least))
            .mask_where(can_grow, grown.min_pair(most));
        self.growth_tracker = tracker.mask_fill(overflow.bool_or(full), 0);
        let refills = if config.consecutive_hysteresis {
            clean
        } else {
            grows
        };
        self.hysteresis_left =
            (self.hysteresis_left.clone() - spends.int()).mask_fill(refills, config.hysteresis);
    }

    /// Sets the scale, like [`LossScaler::set_scale`](crate::LossScaler::set_scale). The host does not wait.
    ///
    /// # Errors
    ///
    /// When `scale` is not a finite number above 0.
    pub fn set_scale(&mut self, scale: f32) -> Result<(), LossScalerError> {
        let scale = LossScalerState::valid_scale(scale)?;
        self.scale = Tensor::from_data([scale], (&self.device, DType::F32));
        Ok(())
    }

    /// The scale that the next loss is multiplied by. The host waits for it. If the scaler is disabled, it is 1, without waiting.
    pub fn current_scale(&self) -> f32 {
        if !self.config.enabled {
            return 1.0;
        }
        self.scale.clone().into_scalar()
    }

    /// The configuration.
    pub fn config(&self) -> &LossScalerConfig {
        &self.config
    }

    /// The state, to be saved with a checkpoint. It fits both kinds of scaler. The host waits for it,
    /// once.
    pub fn state(&self) -> LossScalerState {
        let read = Transaction::default()
            .register(self.scale.clone())
            .register(self.growth_tracker.clone())
            .register(self.hysteresis_left.clone())
            .register(self.overflows_in_a_row.clone())
            .register(self.skipped.clone())
            .execute();
        let int = |at: usize| read[at].iter::<i64>().next().unwrap_or_default();
        LossScalerState {
            scale: read[0].iter().next().unwrap_or_default(),
            growth_tracker: int(1) as u32,
            hysteresis_left: int(2) as u32,
            overflows_in_a_row: int(3) as u32,
            steps: self.steps,
            skipped: int(4) as u64,
        }
    }

    /// Continues from a saved state of either kind of scaler.
    ///
    /// # Errors
    ///
    /// When the state's scale is not a finite number above 0.
    pub fn load_state(self, state: LossScalerState) -> Result<Self, LossScalerError> {
        LossScalerState::valid_scale(state.scale)?;
        Ok(Self::new(self.config, &state, &self.device))
    }
}
