//! Current scaling: every tensor is scaled by its own amax.

use burn::config::Config;

use super::RecipeFormat;

/// Scales every tensor by its own amax, `max / amax`. An amax that is zero, infinite or NaN gives a scale of 1.
///
/// Transformer Engine's `Float8CurrentScaling` and torchao's `tensorwise` recipe. It costs one more read of each tensor
/// than [`DelayedScaling`](super::DelayedScaling), and has no state.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct CurrentScaling {
    /// Which format is used for which pass.
    #[config(default = "RecipeFormat::Hybrid")]
    pub format: RecipeFormat,
    /// Whether scales are rounded down to powers of two.
    #[config(default = false)]
    pub power_of_two: bool,
}
