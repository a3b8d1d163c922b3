//! Delayed scaling: scales from a history of amaxes, as in Transformer Engine.

use burn::config::Config;
use burn::tensor::Tensor;

use super::RecipeFormat;
use crate::{Fp8Error, Fp8Format, functions};

/// Which amax of the history sets the scale.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum AmaxCompute {
    /// The largest amax of the whole history.
    Max,
    /// The latest amax.
    MostRecent,
}

/// Scales every tensor by the amaxes of earlier steps, so that quantizing reads the tensor only once.
///
/// This is Transformer Engine's recipe of that name, with its defaults, except that ranks share amaxes only if they are asked to
/// ([`share_amaxes`](crate::share_amaxes)). The scale starts at 1 and the history at zeros. After
/// each step the amax of that step enters the history, and `scale = (max / 2^margin) / amax`, with the amax that
/// [`amax_compute`](Self::amax_compute) takes from the history. Special cases:
/// - if that amax is zero, infinite or NaN, the scale stays as it is (for an infinity, as long as it is in the window);
/// - a NaN enters the history, but the maximum of a window ignores it;
/// - if the quotient overflows, the scale is the largest f32;
/// - if the tensor was not used in that step (the step's amax is exactly 0), history and scale stay as they are.
///
/// The update happens when the next training pass begins. A pass that does not train (of a layer that is not on an autodiff
/// device) already uses the scales that this update will give, so an evaluation takes the last step into account, as in
/// Transformer Engine. A layer with an [`AmaxReducer`](super::AmaxReducer) of its own evaluates with the scales of its last
/// training pass instead, because newer ones would require all ranks to evaluate together.
///
/// For an [`Fp8Linear`](crate::Fp8Linear) a step is one pass. If a layer runs `n` times before backward, each pass records the
/// amaxes of input and weight of the pass before. So scales change between those passes, a history covers an `n`th of the steps,
/// an [`interval`](Self::interval) counts passes, and [`AmaxCompute::MostRecent`] looks at the last pass. The gradient's amaxes
/// all come with backward, and the largest is recorded once. Transformer Engine records the largest of all calls in an `autocast`
/// for input and weight as well, and burn-amp's `Autocast::fp8` does so for each step.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct DelayedScaling {
    /// A scale maps the amax to the largest fp8 value divided by `2^margin`.
    #[config(default = 0)]
    pub margin: i32,
    /// Which format is used for which pass.
    #[config(default = "RecipeFormat::Hybrid")]
    pub format: RecipeFormat,
    /// The length of the history.
    #[config(default = 1024)]
    pub amax_history_len: usize,
    /// Which amax of the history sets the scale.
    #[config(default = "AmaxCompute::Max")]
    pub amax_compute: AmaxCompute,
    /// The number of steps from one change of the scales to the next. The history records every step.
    #[config(default = 1)]
    pub interval: usize,
}

impl DelayedScaling {
    /// The update for a tensor in `format`.
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

/// One step of delayed scaling for one tensor, in the form that a device takes.
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
    /// Puts `amax` (shape `[1]`) into `history` (slot 0 is free, the others go from the oldest to the newest) and returns the new
    /// history and scale. It runs on the device, without waiting for it.
    ///
    /// # Panics
    /// If the tensors are not f32, if `scale` or `amax` does not have exactly one element, or if `history` is empty.
    #[track_caller]
    pub fn apply(
        &self,
        history: Tensor<1>,
        scale: Tensor<1>,
        amax: Tensor<1>,
    ) -> (Tensor<1>, Tensor<1>) {
        functions::update_scale(history, scale, amax, *self)
    }

    /// [`apply`](Self::apply) on the host.
    #[cfg_attr(not(feature = "flex"), allow(dead_code))]
    pub(crate) fn apply_host(&self, history: &mut [f32], scale: f32, amax: f32) -> f32 {
        if amax == 0.0 {
            return scale;
        }
        history[0] = amax;
        let window = match self.algorithm {
            AmaxCompute::MostRecent => amax,
            // `f32::max` ignores NaN.
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

    /// The value that a scale maps the amax to.
    pub(crate) fn scaled_max(&self) -> f32 {
        self.fp8_max * 2f32.powi(-self.margin)
    }
}
