//! Operands as the tile kernels read them: the inner dimension innermost, its rows in whole 16-byte chunks.

use burn::backend::TensorMetadata;
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{client::Client, prelude::*, server::Handle};

use super::super::batch::{starts, tensor_starts};
use crate::kernels::buffer;

/// Codes in a chunk.
const CHUNK: usize = 16;

/// Matrices of codes whose rows are chunks along the inner dimension.
pub(super) struct Operand {
    handle: Handle,
    /// Words of codes.
    length: usize,
    /// Chunks from a row to the next.
    pub(super) pitch: u32,
    /// The first chunk of each matrix of the batch.
    pub(super) starts: Vec<u32>,
}

impl Operand {
    /// The left side of a product, whose batch dimensions are those of `product`.
    pub(super) fn left(tensor: &CubeTensor, product: &Shape) -> Self {
        let rank = product.num_dims();
        Self::new(tensor, rank - 2, rank - 1, product)
    }

    /// The right side, by columns.
    pub(super) fn right(tensor: &CubeTensor, product: &Shape) -> Self {
        let rank = product.num_dims();
        Self::new(tensor, rank - 1, rank - 2, product)
    }

    fn new(tensor: &CubeTensor, row: usize, inner: usize, product: &Shape) -> Self {
        if let Some(pitch) = pitch_in_place(tensor, row, inner) {
            let starts = tensor_starts(tensor, product);
            let codes = tensor.handle.size_in_used() as usize;
            return Self {
                handle: tensor.handle.clone(),
                length: buffer::words(codes),
                pitch: (pitch / CHUNK) as u32,
                starts: starts.iter().map(|start| (start / CHUNK) as u32).collect(),
            };
        }
        let sizes: Vec<_> = tensor.shape().iter().copied().collect();
        let (rows, length) = (sizes[row], sizes[inner]);
        let pitch = length.div_ceil(CHUNK);
        // The copy's matrices lie one after the other, those of a broadcast tensor once.
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
        let (handle, length) = copy_rows(tensor, &tensor_starts(tensor, &own), row, inner);
        Self {
            handle,
            length,
            pitch: pitch as u32,
            starts: starts.iter().map(|&start| start as u32).collect(),
        }
    }

    /// The codes, as a kernel's argument.
    pub(super) fn words(&self) -> BufferArg {
        buffer::raw(self.handle.clone(), self.length)
    }

    /// The first row of each matrix, counted from the start of the codes, and all codes as one matrix of rows of `chunks`;
    /// `None` where the rows of different matrices are not the same distance apart.
    pub(super) fn as_one_matrix(&self, chunks: usize) -> Option<(Vec<u32>, TensorArg)> {
        let pitch = self.pitch as usize;
        let whole = pitch >= chunks
            && self
                .starts
                .iter()
                .all(|start| start.is_multiple_of(self.pitch));
        if !whole {
            return None;
        }
        let rows = (self.length / 4 - chunks) / pitch + 1;
        let tensor = buffer::matrix(self.handle.clone(), [rows, 16 * chunks], 16 * pitch);
        Some((
            self.starts.iter().map(|start| start / self.pitch).collect(),
            tensor,
        ))
    }
}

/// The codes from a row to the next, if the tensor already lies as it must.
fn pitch_in_place(tensor: &CubeTensor, row: usize, inner: usize) -> Option<usize> {
    let (shape, strides) = (tensor.shape(), tensor.meta.strides());
    let chunked = |dim: usize| shape[dim] == 1 || strides[dim].is_multiple_of(CHUNK);
    let offset = tensor.handle.offset_start.unwrap_or(0);
    let in_place = strides[inner] == 1
        && shape[inner].is_multiple_of(CHUNK)
        && (0..shape.num_dims()).all(|dim| dim == inner || chunked(dim))
        && offset.is_multiple_of(CHUNK as u64);
    in_place.then(|| if shape[row] == 1 { 0 } else { strides[row] })
}

/// A copy with the rows of every matrix along the inner dimension, filled up with zeros to whole chunks.
fn copy_rows(tensor: &CubeTensor, matrices: &[usize], row: usize, inner: usize) -> (Handle, usize) {
    let client: &Client = &tensor.client;
    let (shape, strides) = (tensor.shape(), tensor.meta.strides());
    let words = matrices.len() * shape[row] * shape[inner].div_ceil(CHUNK) * CHUNK / 4;
    let copy = client.empty(4 * words);
    let starts: Vec<u32> = matrices.iter().map(|&start| start as u32).collect();
    let starts = client.create_from_slice(bytemuck::cast_slice(&starts));
    let (count, dim) = buffer::grid(client, words);
    copy_rows_kernel::launch(
        client,
        count,
        dim,
        buffer::code_words(tensor),
        buffer::raw(starts, matrices.len()),
        buffer::raw(copy.clone(), words),
        shape[row] as u32,
        shape[inner] as u32,
        strides[row] as u32,
        strides[inner] as u32,
    );
    (copy, words)
}

/// A unit makes one word of four codes at a time.
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
