//! Floats as kernels read them: four at a time, by one load where they lie so.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{buffer, codec::Four};

/// Elements that a kernel's loads of a tensor have, whose elements lie in whole rows of `columns`: 4, or 1 where some load would
/// not be of one row, or not be aligned.
pub(in crate::kernels) fn vector(tensor: &CubeTensor, columns: usize) -> usize {
    let size = 4 * tensor.dtype.size();
    let offset = tensor.handle.offset_start.unwrap_or(0);
    let aligned = offset.is_multiple_of(size as u64);
    // PTX, and so CUDA, has no loads of more than 16 bytes.
    match columns.is_multiple_of(4) && aligned && size <= 16 {
        true => 4,
        false => 1,
    }
}

/// A tensor that lies row by row, by elements of `vector`.
pub(in crate::kernels) fn by(tensor: &CubeTensor, vector: usize) -> BufferArg {
    let length = tensor.shape().num_elements();
    buffer::array(
        tensor.handle.clone(),
        length / vector,
        vector * tensor.dtype.size(),
    )
}

/// The elements of a slice from number `first` on, a multiple of 4 where its loads have 4; those from `end` on are 0.
#[cube]
pub(in crate::kernels) fn four<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    first: usize,
    end: usize,
) -> Four {
    let size = N::value();
    let mut values = Four::new(0.0f32);
    if comptime!(size == 4) {
        if first < end {
            values = Four::cast_from(input[first / 4]);
        }
    } else {
        #[unroll]
        for lane in 0..4usize {
            if first + lane < end {
                values.insert(lane, f32::cast_from(input[first + lane].extract(0usize)));
            }
        }
    }
    values
}
