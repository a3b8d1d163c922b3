//! [`LossScalerConfig`].

use super::{DeviceLossScaler, LossScaler, LossScalerError, LossScalerState};
use burn::{config::Config, tensor::Device};

/// The configuration of a loss scaler. The defaults are those of PyTorch's `torch.amp.GradScaler`.
///
/// ```
/// use burn_amp::LossScalerConfig;
///
/// let mut scaler = LossScalerConfig::new().with_init_scale(1024.0).init()?;
/// assert_eq!(scaler.current_scale(), 1024.0);
/// # Ok::<(), burn_amp::LossScalerError>(())
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct LossScalerConfig {
    /// The initial scale.
    #[config(default = 65536.0)]
    pub init_scale: f64,
    /// The scale is multiplied by this after `growth_interval` steps without overflow. Above 1.
    #[config(default = 2.0)]
    pub growth_factor: f64,
    /// The scale is multiplied by this after an overflow. Between 0 and 1.
    #[config(default = 0.5)]
    pub backoff_factor: f64,
    /// Steps without overflow before the scale grows.
    #[config(default = 2000)]
    pub growth_interval: u32,
    /// The scale never falls below this (Apex, DeepSpeed); one that is below already stays as it is. PyTorch has no minimum.
    /// At the minimum, DeepSpeed ends a training with an error at an overflow; here the step is skipped, the log warns when many
    /// are in a row, and [`LossScalerState::overflows_in_a_row`](super::LossScalerState::overflows_in_a_row) counts them.
    /// Without one, the scale can fall to zero, where every gradient is NaN.
    #[config(default = "None")]
    pub min_scale: Option<f64>,
    /// The scale never grows above this (Apex).
    #[config(default = "None")]
    pub max_scale: Option<f64>,
    /// How many overflows it takes until the scale falls (DeepSpeed). The earlier ones skip their step and keep the
    /// scale. With 1, it falls at every overflow.
    #[config(default = 1)]
    pub hysteresis: u32,
    /// Whether every step without overflow refills the hysteresis, rather than only growth
    /// (DeepSpeed's `consecutive_hysteresis`).
    #[config(default = false)]
    pub consecutive_hysteresis: bool,
    /// Whether the scale changes at all. A static scale still skips steps that overflow.
    #[config(default = true)]
    pub dynamic: bool,
    /// Whether to scale at all. A disabled scaler passes everything through, unchecked.
    #[config(default = true)]
    pub enabled: bool,
}

impl LossScalerConfig {
    /// A scaler at its initial scale.
    ///
    /// # Errors
    ///
    /// When the initial scale, a factor, the interval, the hysteresis or a bound is invalid.
    pub fn init(&self) -> Result<LossScaler, LossScalerError> {
        self.validate()?;
        Ok(LossScaler::new(self.clone()))
    }

    /// A scaler at its initial scale that keeps its state on `device` and never waits for it.
    ///
    /// # Errors
    ///
    /// Like [`init`](Self::init).
    pub fn init_on(&self, device: &Device) -> Result<DeviceLossScaler, LossScalerError> {
        self.validate()?;
        let state = LossScalerState::new(self);
        Ok(DeviceLossScaler::new(self.clone(), &state, device))
    }

    fn validate(&self) -> Result<(), LossScalerError> {
        let invalid = |what: &'static str, expected: &'static str, found: f64| {
            Err(LossScalerError::Invalid {
                what,
                expected,
                found,
            })
        };
        let (min, max) = self.bounds();
        let init_scale = self.init_scale as f32;
        if !(init_scale > 0.0 && init_scale.is_finite()) {
            return invalid("init_scale", "a finite scale above 0", self.init_scale);
        }
        if !(self.growth_factor > 1.0 && self.growth_factor.is_finite()) {
            return invalid(
                "growth_factor",
                "a finite factor above 1",
                self.growth_factor,
            );
        }
        if !(self.backoff_factor > 0.0 && self.backoff_factor < 1.0) {
            return invalid("backoff_factor", "between 0 and 1", self.backoff_factor);
        }
        if self.growth_interval == 0 {
            return invalid("growth_interval", "at least one step", 0.0);
        }
        if self.hysteresis == 0 {
            return invalid("hysteresis", "at least one overflow", 0.0);
        }
        if min.is_nan() || max.is_nan() || min > max {
            return invalid("min_scale", "a bound below max_scale", min.into());
        }
        Ok(())
    }

    /// The smallest and the largest scale.
    pub(super) fn bounds(&self) -> (f32, f32) {
        let min = self.min_scale.map_or(0.0, |scale| scale as f32);
        let max = self.max_scale.map_or(f32::MAX, |scale| scale as f32);
        (min, max)
    }
}
