//! Recognizes the ops that are products of a linear layer.

use burn::tensor::Shape;
use burn_layer::{Inputs, Op, WeakDescent};
use std::sync::Arc;

/// One of the three products of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Product {
    /// Input times weight.
    Output,
    /// Gradient times the transposed weight.
    InputGradient,
    /// Transposed input times gradient.
    WeightGradient,
}

/// The linear layers that a tensor was the input of: their sizes and weights. Kept with the tensor, and the second value dies with
/// it.
#[derive(Debug, Default)]
pub(super) struct InputOf(
    pub(super) Vec<([usize; 2], WeakDescent)>,
    pub(super) Arc<()>,
);

/// The linear layer that a tensor is the gradient of: its size and weight. Kept with the tensor by the product that computes the
/// input's gradient. The product that computes the weight's gradient comes next and needs this if gradient checkpointing has
/// computed the layer's input again, because that is another tensor.
#[derive(Debug, Default)]
pub(super) struct GradientOf(pub(super) Option<([usize; 2], WeakDescent)>);

/// Whether a tensor was the weight of a linear layer. Kept with the tensor.
#[derive(Debug, Default)]
pub(super) struct WasWeight(pub(super) bool);

/// The product that an op is, and the numbers of inputs and outputs of its layer. `None` if it is no product of a linear layer.
///
/// A layer's products may arrive as `linear` ops; Burn 0.22 sends plain products. A weight is one matrix for the whole batch,
/// transposed or not, that no product computed. So the keys and values of attention are no weights, however many there
/// are. Backward multiplies gradients by the transpositions of such a layer's weight and input. The input is one matrix, or as
/// many as the gradient.
pub(super) fn of(op: Op, inputs: &Inputs) -> Option<(Product, [usize; 2])> {
    let [left, right] = [inputs.shapes.first()?, inputs.shapes.get(1)?];
    let last = |shape: &Shape| shape.last().copied();
    let rows = |shape: &Shape| shape.iter().rev().nth(1).copied();
    let (product, size) = match op {
        Op::linear => (Product::Output, [last(left)?, last(right)?]),
        Op::linear_x_backward => (Product::InputGradient, [*left.first()?, last(left)?]),
        Op::linear_weight_backward => (Product::WeightGradient, [last(left)?, last(right)?]),
        // A matrix times itself, or times its transposition, as in optimizers and contrastive losses, is no layer.
        Op::float_matmul if inputs.same || inputs.mirrored => return None,
        Op::float_matmul if inputs.last_is_gradient => {
            let size = [rows(left)?, last(right)?];
            let is = |(of, _): &([usize; 2], _)| *of == size;
            let was_input = |InputOf(layers, _): &InputOf| match layers.as_slice() {
                [] => None,
                layers => Some(layers.iter().any(is)),
            };
            let of_gradient = || inputs.kept_with_last(|GradientOf(layer)| layer.iter().any(is));
            let was_input = match inputs.kept_with_transposed(was_input).flatten() {
                None if inputs.first_transposed => of_gradient() == Some(true),
                was_input => was_input == Some(true),
            };
            (was_input && is_batch_like(left, right)).then_some((Product::WeightGradient, size))?
        }
        Op::float_matmul if !is_matrix(right) => return None,
        Op::float_matmul if inputs.first_is_gradient && inputs.last_transposed => {
            let was_weight = inputs.kept_with_last_transposed(|WasWeight(was)| *was);
            let size = [last(right)?, rows(right)?];
            (was_weight == Some(true)).then_some((Product::InputGradient, size))?
        }
        Op::float_matmul if inputs.last_is_computed => return None,
        Op::float_matmul => (Product::Output, [rows(right)?, last(right)?]),
        _ => return None,
    };
    let filled = inputs.shapes.iter().all(|shape| shape.num_elements() > 0);
    filled.then_some((product, size))
}

/// Whether two tensors have the same batch dimensions: all but the last two.
fn is_batch_like(left: &Shape, right: &Shape) -> bool {
    let batch = |shape: &Shape| shape.iter().rev().skip(2).copied().collect::<Vec<_>>();
    batch(left) == batch(right)
}

/// Whether a tensor is one matrix, and not a batch of several.
pub(super) fn is_matrix(shape: &Shape) -> bool {
    shape.iter().rev().skip(2).all(|length| *length == 1)
}
