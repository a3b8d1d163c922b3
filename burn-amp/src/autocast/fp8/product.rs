//! Which ops are products of a linear layer.

use burn::tensor::Shape;
use burn_layer::{Descent, Op};

/// One of the three products of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Product {
    /// Input by weight.
    Output,
    /// Gradient by the weight transposed.
    InputGradient,
    /// The input transposed by gradient.
    WeightGradient,
}

/// The linear layers that a tensor was the input of, by their sizes, kept with it.
#[derive(Debug, Default)]
pub(super) struct InputOf(pub(super) Vec<([usize; 2], Descent)>);

/// The product that an op is, and the numbers of inputs and outputs of its layer.
///
/// A layer's products may arrive as ops of their own; Burn 0.22 sends plain products. Output and gradient of the input are known by
/// their right factor, one matrix for the whole batch, and by what is transposed. The gradient of the weight, of one matrix
/// or a sum of products of two batches, is known by its left factor: it is the transposition of what was the input of a
/// layer of that size, as `was_input` tells.
///
/// Attention has a matrix for each sequence and head. With one of each it multiplies `[1, 1, length, features]`, which a layer
/// does as well, but seldom: these are left to the attention, so that its precision does not hang on the size of a batch.
pub(super) fn of(
    op: Op,
    shapes: &[Shape],
    [left_transposed, right_transposed]: [bool; 2],
    was_input: impl FnOnce(&[usize; 2]) -> bool,
) -> Option<(Product, [usize; 2])> {
    let [left, right] = [shapes.first()?, shapes.get(1)?];
    let last = |shape: &Shape| shape.last().copied();
    let rows = |shape: &Shape| shape.iter().rev().nth(1).copied();
    let (product, size) = match op {
        Op::linear => (Product::Output, [last(left)?, last(right)?]),
        Op::linear_x_backward => (Product::InputGradient, [*left.first()?, last(left)?]),
        Op::linear_weight_backward => (Product::WeightGradient, [last(left)?, last(right)?]),
        Op::float_matmul => {
            let weight = [rows(right)?, last(right)?];
            let gradient = [rows(left)?, last(right)?];
            match (is_matrix(left), is_matrix(right)) {
                (true, true) if left.num_dims() > 3 => return None,
                (true, true) | (false, false) if left_transposed => {
                    if !(is_batch_like(left, right) && was_input(&gradient)) {
                        return None;
                    }
                    (Product::WeightGradient, gradient)
                }
                (_, true) if right_transposed => (Product::InputGradient, [weight[1], weight[0]]),
                (_, true) => (Product::Output, weight),
                _ => return None,
            }
        }
        _ => return None,
    };
    let filled = shapes.iter().all(|shape| shape.num_elements() > 0);
    filled.then_some((product, size))
}

/// Whether two tensors are as many matrices.
fn is_batch_like(left: &Shape, right: &Shape) -> bool {
    let batch = |shape: &Shape| shape.iter().rev().skip(2).copied().collect::<Vec<_>>();
    batch(left) == batch(right)
}

/// Whether a tensor is one matrix, and not a batch of several.
pub(super) fn is_matrix(shape: &Shape) -> bool {
    shape.iter().rev().skip(2).all(|length| *length == 1)
}
