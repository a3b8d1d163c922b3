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
    /// Whether the product for the gradient of the weight stays in the input's own dtype, as in torchao's `rowwise_with_gw_hp`: that
    /// gradient sums over all rows of a batch, where outliers cost the most. A layer then keeps its input as it is for backward, not in
    /// fp8.
    #[config(default = false)]
    pub high_precision_weight_gradient: bool,
}
