//! Sums by channel.

use burn_backend::{Backend, Shape, TensorMetadata, tensor::FloatTensor};

/// The sum of each channel of a tensor `[batch, channels, ..]`, times `by`: `[1, channels, 1, ..]`.
///
/// The tensor is summed as it lies in memory, in whatever order its dimensions are, as a convolution leaves them. To turn it into
/// `[channels, samples]` first, as Burn's own norms do, would be a copy. On a backend that [fuses ops](fuses_ops) the sum is one
/// kernel with the ops that compute the elements, and short ones sum what is left. `by` applies after the first sum, which is along
/// one dimension.
///
/// # Panics
///
/// If the tensor has fewer than two dimensions or no elements.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_backend::{TensorMetadata, ops::FloatTensorOps};
/// use burn_flex::Flex;
/// use burn_layer::sum_by_channel;
///
/// let x = Tensor::<3>::from_floats([[[1.0, 2.0], [3.0, 4.0]]], &Device::flex());
/// let sums = sum_by_channel::<Flex>(x.try_into_primitive::<Flex>().unwrap(), 0.5);
/// let sums = Tensor::<3>::from_primitive::<Flex>(sums);
/// assert_eq!(sums.dims(), [1, 2, 1]);
/// assert_eq!(sums.into_data().try_to_vec::<f32>().unwrap(), [1.5, 3.5]);
/// ```
pub fn sum_by_channel<B: Backend>(elements: FloatTensor<B>, by: f64) -> FloatTensor<B> {
    let mut shape = elements.shape();
    let first = summed_first(&shape);
    let sum = B::float_sum_dim(elements, first);
    // Where there is nothing to scale, this is the end of the sum, as in `kernel_end`.
    let sum = B::float_mul_scalar(sum, by.into());
    shape.as_mut_slice()[first] = 1;
    // What is left is small, and no view of something that lies otherwise.
    let samples = shape[2..].iter().product();
    let mut left = B::float_reshape(sum, Shape::new([shape[0], shape[1], samples]));
    for dim in [0, 2] {
        if left.shape()[dim] > 1 {
            left = B::float_sum_dim(left, dim);
        }
    }
    B::float_reshape(left, by_channel(&shape))
}

/// The dimension that elements are summed along first. Batches are the farthest apart in any order, so reads of neighbors go
/// together, and what is left is smaller by their number.
fn summed_first(shape: &Shape) -> usize {
    const MANY: usize = 16;
    let samples = (0..shape.num_dims()).filter(|&dim| dim != 1);
    match shape[0] >= MANY {
        true => 0,
        false => samples.rev().max_by_key(|&dim| shape[dim]).unwrap_or(0),
    }
}

/// The shape of a number of each channel, `[1, channels, 1, ..]`, to be broadcast along `shape`.
pub(crate) fn by_channel(shape: &Shape) -> Shape {
    let mut by_channel = vec![1; shape.num_dims()];
    by_channel[1] = shape[1];
    Shape::from(by_channel)
}

/// Whether the backend of `device` makes one kernel of several ops (Burn's feature `fusion`).
///
/// ```
/// use burn_flex::{Flex, FlexDevice};
///
/// assert!(!burn_layer::fuses_ops::<Flex>(&FlexDevice));
/// ```
pub fn fuses_ops<B: Backend>(device: &B::Device) -> bool {
    B::name(device).starts_with("fusion<")
}
