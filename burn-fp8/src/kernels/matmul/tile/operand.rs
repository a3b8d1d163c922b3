//! Operands in the layout of the tile kernels: the inner dimension innermost, in rows of whole 16-byte chunks.

use burn::backend::TensorMetadata;
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{client::Client, prelude::*, server::Handle};

use super::turn;
use crate::kernels::{
    batch::{side_by_side, starts, tensor_starts},
    buffer,
};

/// Codes in a chunk.
const CHUNK: usize = 16;

/// Matrices of codes, with rows along the inner dimension that start at chunks.
pub(super) struct Operand {
    handle: Handle,
    /// The number of codes, including gaps.
    codes: usize,
    /// Chunks from a row to the next.
    pub(super) pitch: u32,
    /// The first chunk of each matrix of the batch.
    pub(super) starts: Vec<usize>,
}

impl Operand {
    /// The left side of a product, whose batch dimensions are those of `product`.
    pub(super) fn left(tensor: &CubeTensor, product: &Shape) -> Self {
        let rank = product.num_dims();
        Self::new(tensor, rank - 2, rank - 1, product)
    }

    /// The right side of a product, whose rows here are its columns.
    pub(super) fn right(tensor: &CubeTensor, product: &Shape) -> Self {
        let rank = product.num_dims();
        Self::new(tensor, rank - 1, rank - 2, product)
    }

    fn new(tensor: &CubeTensor, row: usize, inner: usize, product: &Shape) -> Self {
        if let Some(pitch) = tensor_pitch_in_place(tensor, row, inner) {
            let starts = tensor_starts(tensor, product);
            return Self {
                handle: tensor.handle.clone(),
                codes: buffer::extent(tensor),
                pitch: (pitch / CHUNK) as u32,
                starts: starts.iter().map(|start| start / CHUNK).collect(),
            };
        }
        let sizes: Vec<_> = tensor.shape().iter().copied().collect();
        let (rows, length) = (sizes[row], sizes[inner]);
        let pitch = length.div_ceil(CHUNK);
        // The copied matrices lie one after the other. A matrix that is broadcast is copied once.
        let mut strides = vec![0; sizes.len()];
        let mut matrices = 1;
        for dim in (0..sizes.len() - 2).rev() {
            strides[dim] = matrices * rows * pitch;
            matrices *= sizes[dim];
        }
        let mut own = tensor.shape();
        own[row] = 1;
        own[inner] = 1;
        let starts = starts(&sizes, &strides, product);
        let (handle, codes) = copy_rows(tensor, &tensor_starts(tensor, &own), row, inner, 0);
        Self {
            handle,
            codes,
            pitch: pitch as u32,
            starts,
        }
    }

    /// The codes, as a kernel's argument.
    pub(super) fn words(&self) -> BufferArg {
        buffer::raw(self.handle.clone(), buffer::words(self.codes))
    }

    /// The first row of each matrix, counted from the start of the codes, and all codes as one matrix with rows of `length`
    /// codes. `None` if the matrices do not start at rows of such a matrix.
    pub(super) fn as_one_matrix(&self, length: usize) -> Option<(Vec<usize>, TensorArg)> {
        let chunks = self.pitch as usize;
        let whole = |start: &usize| start.is_multiple_of(chunks);
        if CHUNK * chunks < length || !self.starts.iter().all(whole) {
            return None;
        }
        let rows = (self.codes - length) / (CHUNK * chunks) + 1;
        let tensor = buffer::matrix(self.handle.clone(), [rows, length], CHUNK * chunks);
        let starts = self.starts.iter().map(|start| start / chunks);
        Some((starts.collect(), tensor))
    }
}

/// A copy of one matrix of codes with the inner dimension innermost, padded with zeros to whole chunks. It has `rows` rows, of
/// which those that the matrix lacks are not set.
pub(in crate::kernels::matmul) fn along(
    tensor: &CubeTensor,
    row: usize,
    inner: usize,
    rows: usize,
) -> CubeTensor {
    let shape = tensor.shape();
    let more = rows - shape[row];
    let shape = Shape::new([rows, buffer::pitch(shape[inner])]);
    let (handle, _) = copy_rows(tensor, &[0], row, inner, more);
    let (client, device) = (tensor.client.clone(), tensor.device.clone());
    CubeTensor::new_contiguous(client, device, shape, handle, tensor.dtype)
}

/// Whether an operand has to be copied.
pub(in crate::kernels::matmul) fn is_copied(tensor: &CubeTensor, row: usize, inner: usize) -> bool {
    tensor_pitch_in_place(tensor, row, inner).is_none()
}

fn tensor_pitch_in_place(tensor: &CubeTensor, row: usize, inner: usize) -> Option<usize> {
    let offset = tensor.handle.offset_start.unwrap_or(0);
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    pitch_in_place(shape, strides, row, inner).filter(|_| offset.is_multiple_of(CHUNK as u64))
}

/// The number of codes from a row to the next, if a tensor has the right layout already.
fn pitch_in_place(shape: &[usize], strides: &[usize], row: usize, inner: usize) -> Option<usize> {
    let chunked = |dim: usize| shape[dim] == 1 || strides[dim].is_multiple_of(CHUNK);
    let in_place = strides[inner] == 1 && (0..shape.len()).all(|dim| dim == inner || chunked(dim));
    in_place.then(|| if shape[row] == 1 { 0 } else { strides[row] })
}

/// A copy with the rows of every matrix along the inner dimension, padded with zeros to whole chunks, and the number of its codes.
/// There is room for `more` rows after them.
fn copy_rows(
    tensor: &CubeTensor,
    matrices: &[usize],
    row: usize,
    inner: usize,
    more: usize,
) -> (Handle, usize) {
    let client: &Client = &tensor.client;
    let (shape, strides) = (tensor.shape(), tensor.meta.strides());
    let pitch = buffer::pitch(shape[inner]);
    let words = matrices.len() * shape[row] * pitch / 4;
    let copy = client.empty(4 * words + more * pitch);
    let starts = side_by_side(client, [matrices]);
    if turn::is_by_words(matrices, strides[row], strides[inner]) {
        turn::launch(
            client,
            buffer::code_words(tensor),
            starts,
            copy.clone(),
            matrices.len(),
            [shape[row], shape[inner]],
            strides[inner],
        );
        return (copy, 4 * words);
    }
    let (count, dim) = buffer::grid(client, words);
    copy_rows_kernel::launch(
        client,
        count,
        dim,
        buffer::code_words(tensor),
        starts,
        buffer::raw(copy.clone(), words),
        shape[row] as u32,
        shape[inner] as u32,
        strides[row] as u32,
        strides[inner] as u32,
    );
    (copy, 4 * words)
}

/// Each unit copies one word of four codes at a time.
#[cube(launch)]
fn copy_rows_kernel(
    codes: &[u32],
    starts: &[u32],
    copy: &mut [u32],
    rows: u32,
    length: u32,
    row_stride: u32,
    inner_stride: u32,
) {
    let row_words = (length.div_ceil(16u32) * 4u32) as usize;
    let mut word = ABSOLUTE_POS;
    while word < copy.len() {
        let inner = (word % row_words * 4) as u32;
        let row = word / row_words % rows as usize;
        let matrix = word / row_words / rows as usize;
        let start = starts[matrix] + row as u32 * row_stride;
        let mut packed = 0u32;
        #[unroll]
        for byte in 0..4u32 {
            if inner + byte < length {
                let index = start + (inner + byte) * inner_stride;
                let code = (codes[(index / 4u32) as usize] >> (index % 4u32 * 8u32)) & 0xFFu32;
                packed |= code << comptime!(8 * byte);
            }
        }
        copy[word] = packed;
        word += CUBE_COUNT * CUBE_DIM as usize;
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::backend::ops::{FloatTensorOps, IntTensorOps};
    use burn::tensor::TensorData;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use burn_std::reader::try_read_sync;

    use super::*;
    use crate::{Fp8Format::E4M3, kernels};

    fn one(like: &CubeTensor) -> CubeTensor {
        CubeBackend::float_from_data(TensorData::from([1f32]), &like.device)
    }

    /// The three products of a linear layer, sizes that no chunk divides included.
    #[test]
    fn gradients_need_no_copy() {
        let device = CubeDevice::Cpu(Default::default());
        for [rows, d_input, d_output] in [[32, 48, 64], [30, 50, 70], [5, 1, 3]] {
            let float = |shape: [usize; 2]| {
                let data = TensorData::zeros::<f32, _>(shape);
                CubeBackend::float_from_data(data, &device)
            };
            let cast = |shape| {
                let float = float(shape);
                let scale = one(&float);
                kernels::quantize_transposed(float, scale, E4M3)
            };
            let (input, input_turned, _) = cast([rows, d_input]);
            let (gradient, gradient_turned, _) = cast([rows, d_output]);
            let (weight, weight_turned, _) = cast([d_input, d_output]);
            let turn = |codes| CubeBackend::int_swap_dims(codes, 0, 1);
            let left = |codes: &CubeTensor| tensor_pitch_in_place(codes, 0, 1);
            let right = |codes: &CubeTensor| tensor_pitch_in_place(codes, 1, 0);
            for pitch in [
                // The output.
                left(&input),
                right(&turn(weight_turned)),
                // The gradient of the input.
                left(&gradient),
                right(&turn(weight.clone())),
                // The gradient of the weight.
                left(&input_turned),
                right(&turn(gradient_turned)),
            ] {
                assert!(pitch.is_some());
            }
            // What would be copied instead: a transposed view, unless it is of a single row or column.
            assert_eq!(left(&turn(input)).is_some(), d_input == 1 && rows == 1);
            assert_eq!(right(&gradient).is_some(), d_output == 1);
            assert_eq!(right(&weight).is_some(), d_output == 1);
        }
    }

    /// Of a matrix as it is, and turned.
    #[test]
    fn copies_lie_along_the_inner_dimension() {
        let device = CubeDevice::Cpu(Default::default());
        let values: Vec<f32> = (0..32 * 48).map(|index| (index % 13) as f32).collect();
        let data = TensorData::new(values, [32, 48]);
        let float = CubeBackend::float_from_data(data, &device);
        let (codes, _) = kernels::quantize(float.clone(), one(&float), E4M3);
        let bytes = |codes| {
            let data = try_read_sync(CubeBackend::int_into_data(codes));
            data.unwrap().unwrap().try_to_vec::<u8>().unwrap()
        };
        assert_eq!(bytes(along(&codes, 0, 1, 32)), bytes(codes.clone()));
        let turned = bytes(CubeBackend::int_swap_dims(codes.clone(), 0, 1));
        assert_eq!(bytes(along(&codes, 1, 0, 48)), turned);
        // With room for more rows.
        let longer = along(&codes, 1, 0, 50);
        assert_eq!(longer.shape(), [50, 32].into());
        assert_eq!(bytes(longer)[..48 * 32], turned);
        assert!(is_copied(&codes, 1, 0) && !is_copied(&codes, 0, 1));
    }

    #[test]
    fn rows_lie_apart_by_whole_chunks() {
        let pitch = |shape: [usize; 2], strides: [usize; 2]| pitch_in_place(&shape, &strides, 0, 1);
        assert_eq!(pitch([3, 20], [32, 1]), Some(32));
        assert_eq!(pitch([3, 20], [20, 1]), None);
        assert_eq!(pitch([1, 20], [20, 1]), Some(0));
        assert_eq!(pitch([3, 20], [0, 1]), Some(0));
        assert_eq!(pitch([16, 32], [1, 16]), None);
        // A batch of such matrices, and one that starts in the middle of a chunk.
        assert_eq!(pitch_in_place(&[2, 3, 20], &[96, 32, 1], 1, 2), Some(32));
        assert_eq!(pitch_in_place(&[2, 3, 20], &[92, 32, 1], 1, 2), None);
    }
}
