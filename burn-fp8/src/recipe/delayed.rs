//! Delayed scaling: scales from a history of amaxes, as in Transformer Engine.

use burn::config::Config;
use burn::tensor::Tensor;

use super::RecipeFormat;
use crate::{Fp8Error, Fp8Format, functions};

/// How the amax that sets the scale is taken from the history.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum AmaxCompute {
    /// The largest of the whole history.
    Max,
    /// The last one.
    MostRecent,
}

/// Scale every tensor by the amaxes of earlier steps, so that quantizing reads the tensor once.
///
/// Transformer Engine's recipe of that name, with its defaults. The scale starts at 1 and the history at zeros; after
/// each step, with the amax of that step in it, `scale = (max / 2^margin) / amax`, and:
/// - if the amax is zero, infinite or NaN, the scale stays (for as long as an infinity is in the window);
/// - a NaN is recorded in the history, but the largest of a window ignores it;
/// - if the quotient overflows, the scale is the largest f32;
/// - if the tensor was not used in that step (its amax is exactly 0), history and scale stay.
///
/// The update is made when the next training pass begins. A pass that does not train (of a layer that is not on an autodiff device)
/// already uses the scales that this update will give, so an evaluation sees the last step, as in Transformer Engine. A layer with an
/// [`AmaxReducer`](super::AmaxReducer) of its own evaluates with the scales of its last training pass instead, because for newer ones all
/// ranks would have to evaluate together.
///
/// For an [`Fp8Linear`](crate::Fp8Linear) a step is a pass. If a layer runs `n` times before backward, each pass records the amaxes of input
/// and weight of the pass before. So scales change between those passes, a history covers an `n`th of the steps, an
/// [`interval`](Self::interval) counts passes, and [`AmaxCompute::MostRecent`] looks at the last pass. The gradient's amaxes all come with
/// backward, and the largest is recorded once. Transformer Engine records the largest of all calls in an `autocast` for input and weight
/// as well, and burn-amp's `Autocast::fp8` does so for each step.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct DelayedScaling {
    /// Powers of two between the scaled amax and the largest fp8 value.
    #[config(default = 0)]
    pub margin: i32,
    /// Which format goes where.
    #[config(default = "RecipeFormat::Hybrid")]
    pub format: RecipeFormat,
    /// Length of the history.
    #[config(default = 1024)]
    pub amax_history_len: usize,
    /// Which amax of the history counts.
    #[config(default = "AmaxCompute::Max")]
    pub amax_compute: AmaxCompute,
    /// Steps from one change of the scales to the next. The history takes every step.
    #[config(default = 1)]
    pub interval: usize,
}

impl DelayedScaling {
    /// The update of a tensor in `format`.
    pub fn update(&self, format: Fp8Format) -> ScaleUpdate {
        ScaleUpdate {
            fp8_max: format.max(),
            margin: self.margin,
            algorithm: self.amax_compute,
        }
    }

    pub(super) fn validate(&self) -> Result<(), Fp8Error> {
        let field = |field, value: i64, expected| {
            Err(Fp8Error::RecipeField {
                field,
                value,
                expected,
            })
        };
        match self {
            Self {
                amax_history_len: 0,
                ..
            } => field("amax_history_len", 0, "at least 1"),
            Self { interval: 0, .. } => field("interval", 0, "at least 1"),
            Self { margin, .. } if !(-64..=64).contains(margin) => {
                field("margin", i64::from(*margin), "between -64 and 64")
            }
            _ => Ok(()),
        }
    }
}

/// One step of delayed scaling for one tensor, as it is given to a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleUpdate {
    /// The largest finite value of the tensor's format.
    pub fp8_max: f32,
    /// See [`DelayedScaling::margin`].
    pub margin: i32,
    /// See [`DelayedScaling::amax_compute`].
    pub algorithm: AmaxCompute,
}

impl ScaleUpdate {
    /// Take `amax` (shape `[1]`) into `history` (slot 0 is free, the others hold the oldest to the newest) and return
    /// the new history and scale. It runs on the device, without waiting for it.
    ///
    /// # Panics
    /// Where the tensors are not f32, `scale` or `amax` not of one element, or `history` empty.
    #[track_caller]
    pub fn apply(
        &self,
        history: Tensor<1>,
        scale: Tensor<1>,
        amax: Tensor<1>,
    ) -> (Tensor<1>, Tensor<1>) {
        functions::update_scale(history, scale, amax, *self)
    }

    /// The same on the host.
    #[cfg_attr(not(feature = "flex"), allow(dead_code))]
    pub(crate) fn apply_host(&self, history: &mut [f32], scale: f32, amax: f32) -> f32 {
        if amax == 0.0 {
            return scale;
        }
        history[0] = amax;
        let window = match self.algorithm {
            AmaxCompute::MostRecent => amax,
            // `f32::max` passes over NaN.
            AmaxCompute::Max => history.iter().copied().fold(0.0, f32::max),
        };
        history.rotate_left(1);
        history[0] = 0.0;
        if window.is_finite() && window > 0.0 {
            (self.scaled_max() / window).min(f32::MAX)
        } else {
            scale
        }
    }

    /// What the largest amax of the window becomes.
    pub(crate) fn scaled_max(&self) -> f32 {
        self.fp8_max * 2f32.powi(-self.margin)
    }
}
