//! Recipes with several scales per tensor, each from the amax of the elements that share it.

use burn::config::Config;

use super::RecipeFormat;
use crate::{Fp8Error, Granularity};

/// A scale for each row of a left operand and each column of a right one, from its own amax. Each of the three products of a
/// layer casts its operands separately.
///
/// This is torchao's `rowwise` recipe with its defaults: e4m3 everywhere, scales rounded down to powers of two. Its
/// `rowwise_with_gw_hp` is near the one with [`high_precision_weight_gradient`](Self::high_precision_weight_gradient), but casts the
/// weight with one scale for the gradient of the input.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct RowwiseScaling {
    /// Which format is used for which pass.
    #[config(default = "RecipeFormat::E4M3")]
    pub format: RecipeFormat,
    /// Whether scales are rounded down to powers of two.
    #[config(default = true)]
    pub power_of_two: bool,
    /// [`CurrentScaling::high_precision_weight_gradient`](super::CurrentScaling::high_precision_weight_gradient).
    #[config(default = false)]
    pub high_precision_weight_gradient: bool,
}

/// A scale for every `1 x size` elements of an activation or gradient (along the inner dimension) and for every `size x size`
/// elements of a weight, each from its own amax. Partial sums of `size` terms are scaled and added in f32.
///
/// This is DeepSeek-V3's recipe (arXiv:2412.19437) and Transformer Engine's `Float8BlockScaling` with its defaults: e4m3
/// everywhere, scales rounded down to powers of two.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct BlockScaling {
    /// Which format is used for which pass.
    #[config(default = "RecipeFormat::E4M3")]
    pub format: RecipeFormat,
    /// The side of a block.
    #[config(default = 128)]
    pub size: usize,
    /// Whether scales are rounded down to powers of two.
    #[config(default = true)]
    pub power_of_two: bool,
    /// [`CurrentScaling::high_precision_weight_gradient`](super::CurrentScaling::high_precision_weight_gradient).
    #[config(default = false)]
    pub high_precision_weight_gradient: bool,
}

impl BlockScaling {
    pub(super) fn validate(&self) -> Result<(), Fp8Error> {
        match self.size {
            0 => Err(Fp8Error::EmptyBlock {
                rows: 0,
                columns: 0,
            }),
            _ => Ok(()),
        }
    }
}

/// Which elements share a scale in the three products of a linear layer. Each operand is described as it is before it is
/// transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearCasts {
    /// Input and weight, in the product for the output.
    pub output: [Granularity; 2],
    /// Gradient and weight, in the product for the gradient of the input.
    pub input_gradient: [Granularity; 2],
    /// Input and gradient, in the product for the gradient of the weight.
    pub weight_gradient: [Granularity; 2],
}

impl LinearCasts {
    /// One scale per tensor.
    pub const TENSOR: Self = Self {
        output: [Granularity::Tensor; 2],
        input_gradient: [Granularity::Tensor; 2],
        weight_gradient: [Granularity::Tensor; 2],
    };
}

impl RowwiseScaling {
    /// The casts of the three products.
    pub fn casts(&self) -> LinearCasts {
        LinearCasts {
            output: [Granularity::Row, Granularity::Column],
            input_gradient: [Granularity::Row, Granularity::Row],
            weight_gradient: [Granularity::Column, Granularity::Column],
        }
    }
}

impl BlockScaling {
    /// The casts of the three products.
    pub fn casts(&self) -> LinearCasts {
        let block = |rows, columns| Granularity::Block { rows, columns };
        let (along_row, along_column) = (block(1, self.size), block(self.size, 1));
        let square = block(self.size, self.size);
        LinearCasts {
            output: [along_row, square],
            input_gradient: [along_row, square],
            weight_gradient: [along_column, along_column],
        }
    }
}
