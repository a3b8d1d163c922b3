//! Which ops are products of a linear layer.

use burn::tensor::Shape;
use burn_layer::Op;

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

/// The product that an op is, and the numbers of inputs and outputs of its layer.
///
/// A layer's products may arrive as ops of their own; Burn 0.22 sends plain products. Those are known by their right factor,
/// one matrix for the whole batch, and by what is transposed. Where the input is multiplied as a batch, the gradient of the
/// weight is a sum of products of two batches, which nothing tells from those of attention.
pub(super) fn of(
    op: Op,
    shapes: &[Shape],
    [left_transposed, right_transposed]: [bool; 2],
) -> Option<(Product, [usize; 2])> {
    let [left, right] = [shapes.first()?, shapes.get(1)?];
    let last = |shape: &Shape| shape.last().copied();
    let matrix = |shape: &Shape| shape.iter().rev().skip(2).all(|length| *length == 1);
    let (product, size) = match op {
        Op::linear => (Product::Output, [last(left)?, last(right)?]),
        Op::linear_x_backward => (Product::InputGradient, [*left.first()?, last(left)?]),
        Op::linear_weight_backward => (Product::WeightGradient, [last(left)?, last(right)?]),
        Op::float_matmul if matrix(right) => {
            let rows = |shape: &Shape| shape.iter().rev().nth(1).copied();
            match () {
                () if left_transposed && matrix(left) => {
                    (Product::WeightGradient, [rows(left)?, last(right)?])
                }
                () if right_transposed => (Product::InputGradient, [last(right)?, rows(right)?]),
                () => (Product::Output, [rows(right)?, last(right)?]),
            }
        }
        _ => return None,
    };
    let filled = shapes.iter().all(|shape| shape.num_elements() > 0);
    filled.then_some((product, size))
}
