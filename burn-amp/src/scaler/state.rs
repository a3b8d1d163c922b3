//! [`LossScalerState`], and how steps change it.

use super::{LossScalerConfig, LossScalerError};
use burn::lr_scheduler::LrSchedulerRecord;
use serde::{Deserialize, Serialize};

/// The state of a [`LossScaler`](super::LossScaler). Save it with the checkpoint, with serde or as
/// a [record of Burn](Self::to_record).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScalerState {
    /// The scale.
    pub scale: f32,
    /// Steps without overflow since the last overflow or the last time the scale was due to grow.
    pub growth_tracker: u32,
    /// The number of overflows until the scale falls, counting the one at which it falls.
    pub hysteresis_left: u32,
    /// Overflows in a row.
    pub overflows_in_a_row: u32,
    /// Steps taken.
    pub steps: u64,
    /// Steps skipped.
    pub skipped: u64,
}

impl LossScalerState {
    pub(super) fn new(config: &LossScalerConfig) -> Self {
        Self {
            scale: config.init_scale as f32,
            growth_tracker: 0,
            hysteresis_left: config.hysteresis,
            overflows_in_a_row: 0,
            steps: 0,
            skipped: 0,
        }
    }

    /// The state as a record of Burn, which can be saved to a burnpack file or to bytes. The record is of the type
    /// that Burn has for learning rate schedulers, whose state also consists of numbers without tensors.
    ///
    /// ```
    /// use burn::lr_scheduler::LrSchedulerRecord;
    /// use burn_amp::{LossScalerConfig, LossScalerState};
    ///
    /// let mut scaler = LossScalerConfig::new().init()?;
    /// scaler.update(true);
    /// let bytes = scaler.state().to_record().into_bytes()?;
    ///
    /// let record = LrSchedulerRecord::from_bytes(bytes)?;
    /// let state = LossScalerState::from_record(&record)?;
    /// assert_eq!(&state, scaler.state());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new()
            .with_scalar("scale", self.scale)
            .with_scalar("growth_tracker", self.growth_tracker)
            .with_scalar("hysteresis_left", self.hysteresis_left)
            .with_scalar("overflows_in_a_row", self.overflows_in_a_row)
            .with_scalar("steps", self.steps)
            .with_scalar("skipped", self.skipped)
    }

    /// The state in a record that [`to_record`](Self::to_record) returned.
    ///
    /// # Errors
    ///
    /// When an entry is missing from the record or has another type.
    pub fn from_record(record: &LrSchedulerRecord) -> Result<Self, LossScalerError> {
        let missing = |missing| LossScalerError::Record { missing };
        let u32 = |key| record.scalar::<u32>(key).ok_or(missing(key));
        let u64 = |key| record.scalar::<u64>(key).ok_or(missing(key));
        Ok(Self {
            scale: record.scalar("scale").ok_or(missing("scale"))?,
            growth_tracker: u32("growth_tracker")?,
            hysteresis_left: u32("hysteresis_left")?,
            overflows_in_a_row: u32("overflows_in_a_row")?,
            steps: u64("steps")?,
            skipped: u64("skipped")?,
        })
    }

    /// Returns `scale` if it is one that gradients can be divided by.
    pub(super) fn valid_scale(scale: f32) -> Result<f32, LossScalerError> {
        match scale > 0.0 && scale.is_finite() {
            true => Ok(scale),
            false => Err(LossScalerError::Invalid {
                what: "scale",
                expected: "a finite scale above 0",
                found: scale.into(),
            }),
        }
    }

    /// Updates the state after a step. `overflow`: whether the step overflowed.
    pub(super) fn update(&mut self, config: &LossScalerConfig, overflow: bool) {
        self.steps += 1;
        if overflow {
            self.skipped += 1;
            self.overflows_in_a_row += 1;
        } else {
            self.overflows_in_a_row = 0;
        }
        if config.dynamic {
            if overflow {
                self.back_off(config)
            } else {
                self.grow(config)
            }
        }
    }

    fn back_off(&mut self, config: &LossScalerConfig) {
        self.growth_tracker = 0;
        if self.hysteresis_left > 1 {
            self.hysteresis_left -= 1;
            return;
        }
        let (min, _) = config.bounds();
        let scale = f64::from(self.scale) * config.backoff_factor;
        // A scale that is below the minimum already stays where it is: an overflow never raises it.
        self.scale = (scale as f32).max(min.min(self.scale));
    }

    fn grow(&mut self, config: &LossScalerConfig) {
        if config.consecutive_hysteresis {
            self.hysteresis_left = config.hysteresis;
        }
        self.growth_tracker += 1;
        if self.growth_tracker < config.growth_interval {
            return;
        }
        self.growth_tracker = 0;
        self.hysteresis_left = config.hysteresis;
        let (_, max) = config.bounds();
        let scale = (f64::from(self.scale) * config.growth_factor) as f32;
        if scale.is_finite() {
            // An initial scale above the maximum stays where it is.
            self.scale = scale.min(max.max(self.scale));
        }
    }
}
