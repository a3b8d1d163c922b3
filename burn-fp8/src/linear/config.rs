use burn::config::Config;
use burn::module::Initializer;
use burn::nn::LinearConfig;
use burn::tensor::Device;

use super::Fp8Linear;
use crate::{Fp8Error, recipe::Fp8Recipe};

/// Configuration of an [`Fp8Linear`].
///
/// ```
/// use burn::tensor::Device;
/// use burn_fp8::{Fp8LinearConfig, recipe::DelayedScaling};
///
/// let config = Fp8LinearConfig::new(64, 10).with_recipe(DelayedScaling::new().with_amax_history_len(16).into());
/// let layer = config.init(&Device::flex());
/// assert_eq!(layer.weight.shape().dims(), [64, 10]);
/// ```
#[derive(Config, Debug)]
pub struct Fp8LinearConfig {
    /// The number of input features.
    pub d_input: usize,
    /// The number of output features.
    pub d_output: usize,
    /// Whether the layer has a bias.
    #[config(default = true)]
    pub bias: bool,
    /// How the parameters are initialized; by default as in Burn's `Linear`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3.0f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// The scaling recipe.
    #[config(default = "Fp8Recipe::default()")]
    pub recipe: Fp8Recipe,
}

impl Fp8LinearConfig {
    /// Creates the layer.
    ///
    /// # Panics
    /// If [`try_init`](Self::try_init) refuses the recipe.
    pub fn init(&self, device: &Device) -> Fp8Linear {
        self.try_init(device)
            .unwrap_or_else(|error| panic!("Fp8LinearConfig: {error}"))
    }

    /// Creates the layer.
    ///
    /// # Errors
    /// See [`Fp8Recipe::validate`].
    pub fn try_init(&self, device: &Device) -> Result<Fp8Linear, Fp8Error> {
        let linear = LinearConfig::new(self.d_input, self.d_output)
            .with_bias(self.bias)
            .with_initializer(self.initializer.clone())
            .init(device);
        Fp8Linear::from_linear(linear, self.recipe)
    }
}
