//! The gradient of a bias that a product's kernel adds.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType, Shape};
use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};

use crate::Bias;

/// Runs a product whose kernel adds the bias in f32, before the output is rounded, so that training and evaluation give the same
/// numbers. (For a 16-bit output, cuBLASLt takes the bias in the output's dtype.) The gradient of the bias is the sum over the
/// rows, in the bias's own dtype. What `product` returns beside the product is passed on.
pub(super) fn with_bias<B: Backend, C: CheckpointStrategy, T>(
    bias: Bias<Autodiff<B, C>>,
    product: impl FnOnce(Bias<B>) -> (FloatTensor<Autodiff<B, C>>, T),
) -> (FloatTensor<Autodiff<B, C>>, T) {
    let Bias::Row(bias) = bias else {
        return product(Bias::None);
    };
    let state = (bias.shape(), bias.dtype().into());
    let (bias, bias_node) = bias.into_parts();
    let (product, rest) = product(Bias::Row(bias));
    let (product, product_node) = product.into_parts();
    let prepared = AddedBias.prepare::<C>([product_node, bias_node]);
    let product = match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(state, product),
        OpsKind::UnTracked(prep) => prep.finish(product),
    };
    (product, rest)
}

/// The step from a product without its bias to the product with it.
#[derive(Debug)]
struct AddedBias;

impl<B: Backend> Backward<B, 2> for AddedBias {
    /// Shape and dtype of the original bias.
    type State = (Shape, FloatDType);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [product_node, bias_node] = ops.parents;
        let (shape, dtype) = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        if let Some(node) = bias_node {
            grads.register::<B>(node.id, sum_of_rows::<B>(grad.clone(), shape, dtype));
        }
        if let Some(node) = product_node {
            grads.register::<B>(node.id, grad);
        }
    }
}

/// The sum of all rows, in the shape and dtype of the bias.
fn sum_of_rows<B: Backend>(
    grad: FloatTensor<B>,
    shape: Shape,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let all = grad.shape();
    if all.num_elements() == 0 {
        return B::float_zeros(shape, &grad.device(), dtype);
    }
    let columns = shape.num_elements();
    // Sums in the wider of the two dtypes, so that the result is rounded only once, at the end.
    let narrows = DType::from(dtype).size() < grad.dtype().size();
    let grad = match narrows {
        true => grad,
        false => into_dtype::<B>(grad, dtype),
    };
    let rows = B::float_reshape(grad, Shape::new([all.num_elements() / columns, columns]));
    let sum = B::float_reshape(B::float_sum_dim(rows, 0), shape);
    into_dtype::<B>(sum, dtype)
}

pub(super) fn into_dtype<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    match FloatDType::from(tensor.dtype()) == dtype {
        true => tensor,
        false => B::float_cast(tensor, dtype),
    }
}
