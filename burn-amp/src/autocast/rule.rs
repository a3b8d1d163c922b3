//! [`Rule`]: the precision that an op runs in.

use burn_layer::Op;
use serde::{Deserialize, Serialize};

/// The precision that an op runs in. Float64 inputs are left alone under every rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Compute in the low dtype. The result stays low.
    Lower,
    /// Compute in the low dtype and store the result in f32: gradients of weights.
    WeightGrad,
    /// Compute in f32. The result stays f32, unless the policy stores
    /// [low outputs](crate::PolicyBuilder::low_outputs).
    Full,
    /// Compute in f32. The result stays f32 under every policy: sums, and gradients that are sums.
    Accumulate,
    /// Compute in f32 and store the result in the dtype of the first input, as PyTorch's kernels do: for example batch
    /// normalization, and `gelu` in fp16.
    FullKeep,
    /// Compute in the widest dtype that an input is stored in; with one input, in the dtype of that one.
    Promote,
}

impl Rule {
    /// The rule of `op`, which is the backward of an op under this rule. Gradients of weights and biases are stored in f32.
    pub(super) fn of_backward(self, op: Op) -> Self {
        // A sum over all tokens, in the dtype that it is given.
        if op == Op::embedding_backward {
            return Rule::Accumulate;
        }
        // The last two give the gradients of parameters beside that of the input.
        let of_weight = [
            "_weight_backward",
            "_bias_backward",
            "deform_conv2d_backward",
            "batch_norm_train_backward",
        ];
        match of_weight.iter().any(|end| op.name().ends_with(end)) {
            true => self.of_weight(),
            false => self,
        }
    }

    /// The rule of the gradient of a weight of an op under this rule.
    pub(super) fn of_weight(self) -> Self {
        match self {
            Rule::Lower => Rule::WeightGrad,
            Rule::Full | Rule::FullKeep => Rule::Accumulate,
            rule => rule,
        }
    }
}

impl core::fmt::Display for Rule {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(match self {
            Rule::Lower => "lower",
            Rule::WeightGrad => "lower, stored f32",
            Rule::Full => "full",
            Rule::Accumulate => "full, stored f32",
            Rule::FullKeep => "full, stored as input",
            Rule::Promote => "promote",
        })
    }
}
