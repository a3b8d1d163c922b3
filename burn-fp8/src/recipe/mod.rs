//! Recipes: which formats are used, and where the scales come from.

mod current;
mod delayed;
mod granular;
mod reducer;

pub use current::CurrentScaling;
pub use delayed::{AmaxCompute, DelayedScaling, ScaleUpdate};
pub use granular::{BlockScaling, LinearCasts, RowwiseScaling};
pub use reducer::AmaxReducer;

use burn::config::Config;

use crate::{Fp8Error, Fp8Format};

/// Which format a recipe uses for which pass.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum RecipeFormat {
    /// E4m3 forward, e5m2 for gradients: the default of Transformer Engine and of this crate.
    Hybrid,
    /// E4m3 everywhere.
    E4M3,
    /// E5m2 everywhere. [`validate`](Fp8Recipe::validate) refuses it, because it is too coarse for the forward pass.
    E5M2,
}

impl RecipeFormat {
    /// The format of inputs and weights.
    pub fn forward(self) -> Fp8Format {
        match self {
            Self::Hybrid | Self::E4M3 => Fp8Format::E4M3,
            Self::E5M2 => Fp8Format::E5M2,
        }
    }

    /// The format of gradients.
    pub fn gradient(self) -> Fp8Format {
        match self {
            Self::E4M3 => Fp8Format::E4M3,
            Self::Hybrid | Self::E5M2 => Fp8Format::E5M2,
        }
    }

    fn validate(self) -> Result<(), Fp8Error> {
        match self.forward() {
            Fp8Format::E4M3 => Ok(()),
            format => Err(Fp8Error::ForwardFormat { format }),
        }
    }
}

/// A scaling recipe. It serializes, also to JSON (`Config`).
///
/// ```
/// use burn_fp8::recipe::{DelayedScaling, Fp8Recipe};
///
/// let recipe = Fp8Recipe::from(DelayedScaling::new().with_amax_history_len(16).with_margin(1));
/// assert!(recipe.validate().is_ok());
/// ```
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Fp8Recipe {
    /// Scales from the amaxes of earlier steps.
    Delayed(DelayedScaling),
    /// Scales from the amax of the tensor itself.
    Current(CurrentScaling),
    /// A scale per row or column.
    Rowwise(RowwiseScaling),
    /// A scale per block.
    Block(BlockScaling),
}

impl Fp8Recipe {
    /// Which format is used for which pass.
    pub fn format(&self) -> RecipeFormat {
        match self {
            Self::Delayed(recipe) => recipe.format,
            Self::Current(recipe) => recipe.format,
            Self::Rowwise(recipe) => recipe.format,
            Self::Block(recipe) => recipe.format,
        }
    }

    /// Whether scales are rounded down to powers of two. With delayed scaling they never are.
    pub fn power_of_two(&self) -> bool {
        match self {
            Self::Delayed(_) => false,
            Self::Current(recipe) => recipe.power_of_two,
            Self::Rowwise(recipe) => recipe.power_of_two,
            Self::Block(recipe) => recipe.power_of_two,
        }
    }

    /// Whether the product for the gradient of the weight stays in the input's own dtype. With delayed scaling it never does.
    pub fn high_precision_weight_gradient(&self) -> bool {
        match self {
            Self::Delayed(_) => false,
            Self::Current(recipe) => recipe.high_precision_weight_gradient,
            Self::Rowwise(recipe) => recipe.high_precision_weight_gradient,
            Self::Block(recipe) => recipe.high_precision_weight_gradient,
        }
    }

    /// Which elements share a scale in the three products of a linear layer.
    pub fn casts(&self) -> LinearCasts {
        match self {
            Self::Delayed(_) | Self::Current(_) => LinearCasts::TENSOR,
            Self::Rowwise(recipe) => recipe.casts(),
            Self::Block(recipe) => recipe.casts(),
        }
    }

    /// Checks the recipe.
    ///
    /// # Errors
    /// [`Fp8Error::ForwardFormat`] for e5m2 in the forward pass, [`Fp8Error::RecipeField`] for a field out of range,
    /// [`Fp8Error::EmptyBlock`] for blocks of size 0.
    pub fn validate(&self) -> Result<(), Fp8Error> {
        self.format().validate()?;
        match self {
            Self::Delayed(recipe) => recipe.validate(),
            Self::Current(_) | Self::Rowwise(_) => Ok(()),
            Self::Block(recipe) => recipe.validate(),
        }
    }
}

impl Default for Fp8Recipe {
    fn default() -> Self {
        Self::Delayed(DelayedScaling::new())
    }
}

/// Also into `Option`, for functions that take an optional recipe.
macro_rules! from_recipe {
    ($($variant:ident($recipe:ident)),*) => {$(
        impl From<$recipe> for Fp8Recipe {
            fn from(recipe: $recipe) -> Self {
                Self::$variant(recipe)
            }
        }

        impl From<$recipe> for Option<Fp8Recipe> {
            fn from(recipe: $recipe) -> Self {
                Some(recipe.into())
            }
        }
    )*};
}

from_recipe!(
    Delayed(DelayedScaling),
    Current(CurrentScaling),
    Rowwise(RowwiseScaling),
    Block(BlockScaling)
);
