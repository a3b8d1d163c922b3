//! Additions to selected rows, such as the gradient of an embedding.
//!
//! CubeCL 0.11 adds them one after the other, a thread for each column: 3 ms for 8,192 rows of 768 columns on an H200. A scatter adds
//! them side by side, by atomic additions. As with the gradient of `gather`, sums are rounded in no fixed order then.

use crate::LayerSet;
use burn_backend::{
    Backend, DType, Shape, TensorMetadata,
    tensor::{FloatTensor, IndexingUpdateOp, IntTensor},
};

/// The fewest selected rows for which it is worth it.
const ROWS: usize = 256;

/// Assigns `value` to the rows `indices` of `tensor`, along `dim`.
pub(super) fn select_assign<B: Backend>(
    layers: &LayerSet,
    tensor: FloatTensor<B>,
    dim: usize,
    indices: IntTensor<B>,
    value: FloatTensor<B>,
    update: IndexingUpdateOp,
) -> FloatTensor<B> {
    let atomic = layers.is_on_cuda() && tensor.dtype() == DType::F32;
    let adds = matches!(update, IndexingUpdateOp::Add);
    match atomic && adds && value.shape()[dim] >= ROWS {
        true => scattered::<B>(tensor, dim, indices, value),
        false => B::float_select_assign(tensor, dim, indices, value, update),
    }
}

/// The gradient of an embedding: `grad` is added to the rows that were selected of `weights`.
pub(super) fn embedding_backward<B: Backend>(
    layers: &LayerSet,
    weights: FloatTensor<B>,
    grad: FloatTensor<B>,
    indices: IntTensor<B>,
) -> FloatTensor<B> {
    if !layers.is_on_cuda() || grad.dtype() != DType::F32 {
        return B::embedding_backward(weights, grad, indices);
    }
    let (count, shape) = (indices.shape().num_elements(), weights.shape());
    let indices = B::int_reshape(indices, Shape::new([count]));
    let grad = B::float_reshape(grad, Shape::new([count, shape[1]]));
    let zeros = B::float_zeros(shape, &weights.device(), DType::F32.into());
    select_assign::<B>(layers, zeros, 0, indices, grad, IndexingUpdateOp::Add)
}

fn scattered<B: Backend>(
    tensor: FloatTensor<B>,
    dim: usize,
    indices: IntTensor<B>,
    value: FloatTensor<B>,
) -> FloatTensor<B> {
    let shape = value.shape();
    let mut along = vec![1; shape.num_dims()];
    along[dim] = shape[dim];
    let indices = B::int_expand(B::int_reshape(indices, Shape::from(along)), shape);
    B::float_scatter(dim, tensor, indices, value, IndexingUpdateOp::Add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer_set::Stack;
    use burn_backend::{
        TensorData,
        ops::{FloatTensorOps, IntTensorOps, ModuleOps},
    };
    use burn_flex::{Flex, FlexDevice};

    fn numbers(shape: &[usize]) -> FloatTensor<Flex> {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| (i * 7 % 13) as f32).collect();
        Flex::float_from_data(TensorData::new(values, shape.to_vec()), &FlexDevice)
    }

    fn data(tensor: FloatTensor<Flex>) -> TensorData {
        let data = Flex::float_into_data(tensor);
        burn_std::reader::try_read_sync(data).unwrap().unwrap()
    }

    #[test]
    fn the_gradient_of_an_embedding_is_the_same() {
        let (layers, custom_ops) = (Vec::new(), None);
        let layers = LayerSet::new(0, Stack { layers, custom_ops });
        layers.set_on_cuda();
        for length in [3, 150] {
            let (weights, grad) = (numbers(&[9, 4]), numbers(&[2, length, 4]));
            let indices: Vec<i64> = (0..2 * length as i64).map(|i| i * i % 9).collect();
            let indices = TensorData::new(indices, [2, length]);
            let indices = || Flex::int_from_data(indices.clone(), &FlexDevice);
            let expected = Flex::embedding_backward(weights.clone(), grad.clone(), indices());
            let found = embedding_backward::<Flex>(&layers, weights, grad, indices());
            assert_eq!(data(found), data(expected), "{length}");
        }
    }

    #[test]
    fn a_scatter_adds_the_same() {
        for dim in 0..3 {
            let (tensor, mut shape) = (numbers(&[4, 5, 6]), [4, 5, 6]);
            shape[dim] = 7;
            let value = numbers(&shape);
            // Some rows are selected again.
            let indices: Vec<i64> = (0..7).map(|i| i * i % 4).collect();
            let indices = TensorData::new(indices, [7]);
            let indices = || Flex::int_from_data(indices.clone(), &FlexDevice);
            let add = IndexingUpdateOp::Add;
            let (one, other) = (tensor.clone(), value.clone());
            let expected = Flex::float_select_assign(one, dim, indices(), other, add);
            let found = scattered::<Flex>(tensor, dim, indices(), value);
            assert_eq!(data(found), data(expected), "{dim}");
        }
    }
}
