//! The positions at which the matrices of a batch start.

use burn::backend::TensorMetadata;
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{client::Client, prelude::BufferArg};

use super::buffer;

/// The first element of each matrix of a batch of `shape`, for a tensor whose batch dimensions have these `sizes` and `strides`,
/// and may be broadcast.
pub(in crate::kernels) fn starts(sizes: &[usize], strides: &[usize], shape: &Shape) -> Vec<usize> {
    let dims = shape.num_dims() - 2;
    let batches = shape.iter().take(dims).product();
    (0..batches)
        .map(|mut batch| {
            let mut start = 0;
            for dim in (0..dims).rev() {
                if sizes[dim] > 1 {
                    start += batch % shape[dim] * strides[dim];
                }
                batch /= shape[dim];
            }
            start
        })
        .collect()
}

/// [`starts`] for a tensor of codes, by its strides.
pub(in crate::kernels) fn tensor_starts(tensor: &CubeTensor, shape: &Shape) -> Vec<usize> {
    let sizes: Vec<_> = tensor.shape().iter().copied().collect();
    starts(&sizes, tensor.meta.strides(), shape)
}

/// Such positions as a kernel's argument: for each matrix, those in all of the lists.
pub(in crate::kernels) fn side_by_side<const N: usize>(
    client: &Client,
    lists: [impl AsRef<[usize]>; N],
) -> BufferArg {
    let lists = lists.each_ref().map(AsRef::as_ref);
    let matrix = |index: usize| lists.map(|starts| starts[index] as u32);
    let all: Vec<u32> = (0..lists[0].len()).flat_map(matrix).collect();
    let count = all.len();
    buffer::raw(client.create_from_slice(bytemuck::cast_slice(&all)), count)
}
