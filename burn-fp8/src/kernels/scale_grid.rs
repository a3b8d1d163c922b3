//! How a kernel finds the scale of an element.

use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{batch::tensor_starts, buffer};
use crate::Granularity;

/// The layout of a matrix of scales in memory: one scale for every `rows` by `columns` elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::kernels) struct ScaleGrid {
    rows: u32,
    columns: u32,
    row_stride: u32,
    column_stride: u32,
}

/// The position of an element's scale, in a matrix whose scales start at `start`.
#[cube]
pub(in crate::kernels) fn scale_index(
    grid: &ScaleGrid,
    start: usize,
    row: usize,
    column: usize,
) -> usize {
    start
        + row / grid.rows as usize * grid.row_stride as usize
        + column / grid.columns as usize * grid.column_stride as usize
}

/// A side of a block, of which the kernels know that it has at most as many elements as they count.
pub(in crate::kernels) fn clamped(side: usize) -> u32 {
    u32::try_from(side).unwrap_or(u32::MAX)
}

/// The scales of a tensor of codes: with as many dimensions as the codes, or one scale for the whole tensor.
#[derive(Clone)]
pub(in crate::kernels) struct Scales {
    pub(in crate::kernels) tensor: CubeTensor,
    pub(in crate::kernels) granularity: Granularity,
}

impl Scales {
    /// The argument for a kernel's [`scale_index`].
    pub(in crate::kernels) fn grid(&self) -> ScaleGridLaunch {
        let size = |elements: Option<usize>| elements.map_or(u32::MAX, clamped);
        let [row_stride, column_stride] = self.strides();
        ScaleGridLaunch::new(
            size(self.granularity.rows()),
            size(self.granularity.columns()),
            row_stride,
            column_stride,
        )
    }

    /// The distances from the scales of one row to those of the next, and from those of one column to those of the next.
    pub(in crate::kernels) fn strides(&self) -> [u32; 2] {
        if self.granularity == Granularity::Tensor {
            return [0, 0];
        }
        let strides = self.tensor.meta.strides();
        let rank = self.tensor.meta.num_dims();
        [strides[rank - 2] as u32, strides[rank - 1] as u32]
    }

    /// The first scale of each matrix of a batch of `shape`.
    pub(in crate::kernels) fn starts(&self, shape: &Shape) -> Vec<usize> {
        if self.granularity == Granularity::Tensor {
            let batches = shape.iter().take(shape.num_dims() - 2).product();
            return vec![0; batches];
        }
        tensor_starts(&self.tensor, shape)
    }

    /// The scales, as a kernel's argument.
    pub(in crate::kernels) fn elements(&self) -> BufferArg {
        buffer::assert_f32(&self.tensor);
        buffer::as_it_lies(&self.tensor)
    }

    /// The scales of a one-dimensional tensor as the scales of a row.
    pub(in crate::kernels) fn into_row(self) -> Self {
        Self {
            tensor: buffer::into_row(self.tensor),
            ..self
        }
    }

    /// The scales of the transpose.
    pub(in crate::kernels) fn swapped(self) -> Self {
        Self {
            tensor: match self.granularity {
                Granularity::Tensor => self.tensor,
                _ => buffer::swapped(self.tensor),
            },
            granularity: self.granularity.transposed(),
        }
    }
}
