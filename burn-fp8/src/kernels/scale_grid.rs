//! Which scale an element has.

use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{batch::tensor_starts, buffer};
use crate::Granularity;

/// The scales of a matrix in memory: one of every `rows` by `columns` elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::kernels) struct ScaleGrid {
    rows: u32,
    columns: u32,
    row_stride: u32,
    column_stride: u32,
}

/// Where the scale of an element is, in a matrix whose scales start at `start`.
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

/// The scales of a tensor of codes: as many dimensions as it has, or one scale for all.
#[derive(Clone)]
pub(in crate::kernels) struct Scales {
    pub(in crate::kernels) tensor: CubeTensor,
    pub(in crate::kernels) granularity: Granularity,
}

impl Scales {
    /// What a kernel's [`scale_index`] takes.
    pub(in crate::kernels) fn grid(&self) -> ScaleGridLaunch {
        let size = |elements: Option<usize>| elements.map_or(u32::MAX, |size| size as u32);
        let [row_stride, column_stride] = self.strides();
        ScaleGridLaunch::new(
            size(self.granularity.rows()),
            size(self.granularity.columns()),
            row_stride,
            column_stride,
        )
    }

    /// From the scales of a row to those of the next, and the same of columns.
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

    /// Those of one dimension as those of a row.
    pub(in crate::kernels) fn into_row(self) -> Self {
        Self {
            tensor: buffer::into_row(self.tensor),
            ..self
        }
    }

    /// Those of the transpose.
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
