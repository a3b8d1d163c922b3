//! Which elements of a matrix share a scale.

use burn::tensor::Shape;
use cubecl::{prelude::*, std::FastDivmod};

use super::codec::Four;
use crate::Granularity;

/// The matrices of a tensor, and their blocks.
pub(in crate::kernels) struct Blocks {
    pub(in crate::kernels) matrix: [usize; 2],
    /// The size of a block, limited to that of the matrix.
    pub(in crate::kernels) block: [usize; 2],
}

/// [`Blocks`] in a kernel, with divisors by some of the sizes.
#[derive(CubeType, CubeLaunch)]
pub(in crate::kernels) struct Grid {
    pub(in crate::kernels) rows: usize,
    pub(in crate::kernels) columns: usize,
    pub(in crate::kernels) by_rows: FastDivmod<usize>,
    pub(in crate::kernels) block_rows: usize,
    pub(in crate::kernels) block_columns: usize,
    pub(in crate::kernels) by_block_rows: FastDivmod<usize>,
    pub(in crate::kernels) by_block_columns: FastDivmod<usize>,
    pub(in crate::kernels) down: usize,
    pub(in crate::kernels) across: usize,
    pub(in crate::kernels) by_down: FastDivmod<usize>,
}

impl Blocks {
    /// The blocks of a tensor that has elements. A tensor with a single dimension is a row.
    pub(in crate::kernels) fn of(shape: &Shape, granularity: Granularity) -> Self {
        let rank = shape.num_dims();
        let rows = if rank > 1 { shape[rank - 2] } else { 1 };
        let columns = shape[rank - 1];
        let within = |size: Option<usize>, most: usize| size.map_or(most, |size| size.min(most));
        Self {
            matrix: [rows, columns],
            block: [
                within(granularity.rows(), rows),
                within(granularity.columns(), columns),
            ],
        }
    }

    /// The number of matrices of a tensor with `elements` elements.
    pub(in crate::kernels) fn matrices(&self, elements: usize) -> usize {
        elements / (self.matrix[0] * self.matrix[1])
    }

    /// The number of blocks along a dimension of a matrix.
    pub(in crate::kernels) fn along(&self, dim: usize) -> usize {
        self.matrix[dim].div_ceil(self.block[dim])
    }

    /// Whether each group of four elements of a row, counted from its start, shares a scale.
    pub(in crate::kernels) fn by_fours(&self) -> bool {
        self.block[1].is_multiple_of(4) || self.block[1] == self.matrix[1]
    }

    pub(in crate::kernels) fn launch(&self) -> GridLaunch {
        let [rows, columns] = self.matrix;
        let [block_rows, block_columns] = self.block;
        let [down, across] = [0, 1].map(|dim| self.along(dim));
        GridLaunch::new(
            rows,
            columns,
            rows,
            block_rows,
            block_columns,
            block_rows,
            block_columns,
            down,
            across,
            down,
        )
    }
}

/// The number of the block that an element is in.
#[cube]
pub(in crate::kernels) fn block(grid: &Grid, matrix: usize, row: usize, column: usize) -> usize {
    let line = matrix * grid.down + grid.by_block_rows.div(row);
    line * grid.across + grid.by_block_columns.div(column)
}

/// The scales of the four elements from `column` on, which is a multiple of 4. Beyond the edges, the scales of the last row and
/// column.
#[cube]
pub(in crate::kernels) fn four_scales(
    scales: &[f32],
    grid: &Grid,
    matrix: usize,
    row: usize,
    column: usize,
    #[comptime] by_fours: bool,
) -> Four {
    let row = usize::min(row, grid.rows - 1);
    let last = grid.columns - 1;
    let mut four = Four::new(scales[block(grid, matrix, row, usize::min(column, last))]);
    if comptime!(!by_fours) {
        #[unroll]
        for lane in 1..4usize {
            let column = usize::min(column + lane, last);
            four.insert(lane, scales[block(grid, matrix, row, column)]);
        }
    }
    four
}
