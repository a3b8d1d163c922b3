//! Applying the scales of rows, columns and blocks to a tile's sums.

use cubecl::prelude::*;

use super::{
    cluster::cube_in_cluster,
    layout::{COLUMNS, ROWS, SUMS, sum_column, sum_row, tile_column, tile_row},
    plan::Plan,
};
use crate::kernels::scale_grid::Scales;

/// How many rows of the left operand and columns of the right one share a scale, and when the scales are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scaling {
    /// Each operand has one scale, applied to the sums.
    Whole,
    /// Scales of rows and columns, applied to the sums.
    Sums { rows: u32, columns: u32 },
    /// Scales that change along the inner dimension, applied to the partial sums of every step. So many steps share a scale of the
    /// left and of the right operand.
    Steps {
        rows: u32,
        columns: u32,
        steps: [u32; 2],
    },
}

impl Scaling {
    /// Rows that share a scale.
    fn rows(self) -> u32 {
        match self {
            Self::Whole => u32::MAX,
            Self::Sums { rows, .. } | Self::Steps { rows, .. } => rows,
        }
    }

    /// Steps that share a scale of operand `of` (0 or 1).
    fn steps(self, of: usize) -> u32 {
        match self {
            Self::Steps { steps, .. } => steps[of],
            _ => u32::MAX,
        }
    }

    /// Columns that share a scale.
    fn columns(self) -> u32 {
        match self {
            Self::Whole => u32::MAX,
            Self::Sums { columns, .. } | Self::Steps { columns, .. } => columns,
        }
    }

    /// Scales that a unit's columns have in a step of `wgmma`.
    pub(super) fn step_columns(self) -> usize {
        match self {
            Self::Steps { columns, .. } if !shared_by_tiles(columns) => 32,
            _ => 1,
        }
    }
}

/// The layout of the inverse scales.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Strides {
    /// The distance from the scale of some rows of the left operand to that of the next rows.
    left: u32,
    /// The distance from the scale of some terms of the left operand to that of the next terms.
    left_inner: u32,
    /// The same for the right operand and its columns.
    right: u32,
    right_inner: u32,
}

/// The kernels' argument.
pub(super) fn strides(left: &Scales, right: &Scales) -> StridesLaunch {
    let [left_outer, left_inner] = left.strides();
    let [right_inner, right_outer] = right.strides();
    StridesLaunch::new(left_outer, left_inner, right_outer, right_inner)
}

/// The part of a batch of products that a cube computes at a time.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Part {
    /// The number of the product.
    pub(super) product: u32,
    pub(super) first_row: u32,
    pub(super) first_column: u32,
    /// Rows of a product.
    pub(super) rows: u32,
    /// Columns of a product.
    pub(super) columns: u32,
    /// The first scales of the product's operands.
    left_start: u32,
    right_start: u32,
}

/// Where an operand (`of` 0 or 1) or its scales (2 or 3) start for a product. `starts` has these four for each product of a batch. A
/// product that is not in a batch starts at 0.
#[cube]
pub(super) fn start(
    starts: &[u32],
    product: u32,
    #[comptime] of: usize,
    #[comptime] plan: Plan,
) -> u32 {
    if comptime!(plan.batched) {
        starts[4 * product as usize + of]
    } else {
        0u32.runtime()
    }
}

/// Part `number` of a batch of products of `rows` by `columns`. For a cluster, it is the part of one of its cubes.
#[cube]
pub(super) fn part(
    starts: &[u32],
    number: u32,
    rows: u32,
    columns: u32,
    #[comptime] plan: Plan,
) -> Part {
    // The cubes of a cluster compute neighboring columns of tiles.
    let cubes = comptime!(plan.cubes);
    let across = columns.div_ceil(COLUMNS).div_ceil(cubes);
    let down = rows.div_ceil(plan.rows);
    let product = number / (across * down);
    let tile = number % (across * down);
    let column = tile_column(tile, across, down) * cubes + cube_in_cluster(cubes);
    Part {
        product: product,
        first_row: tile_row(tile, across, down) * comptime!(plan.rows),
        first_column: column * COLUMNS,
        rows: rows,
        columns: columns,
        left_start: start(starts, product, 2usize, plan),
        right_start: start(starts, product, 3usize, plan),
    }
}

/// The factor of sum `index` of a unit in step `step`: the inverse scales of its row and its column, multiplied with each other
/// first, as in DeepGEMM.
#[cube]
pub(super) fn factor(
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    part: &Part,
    strides: &Strides,
    unit: u32,
    index: u32,
    step: u32,
    #[comptime] plan: Plan,
) -> f32 {
    row_scale(lhs_scale, part, strides, unit, index, step, plan)
        * column_scale(rhs_scale, part, strides, unit, index, step, plan)
}

/// The inverse scale of the row of a unit's sum.
#[cube]
pub(super) fn row_scale(
    scale: &[f32],
    part: &Part,
    strides: &Strides,
    unit: u32,
    index: u32,
    step: u32,
    #[comptime] plan: Plan,
) -> f32 {
    let rows = comptime!(plan.scaling.rows());
    // If 128 rows share a scale, all their sums read the same one.
    let row = if comptime!(shared_by_tiles(rows)) {
        part.first_row + index / SUMS * ROWS
    } else {
        part.first_row + sum_row(unit, index, plan.instruction)
    };
    let place = part.left_start
        + u32::min(row, part.rows - 1u32) / rows * strides.left
        + step / comptime!(plan.scaling.steps(0)) * strides.left_inner;
    scale[place as usize]
}

/// The inverse scale of the column of a unit's sum.
#[cube]
pub(super) fn column_scale(
    scale: &[f32],
    part: &Part,
    strides: &Strides,
    unit: u32,
    index: u32,
    step: u32,
    #[comptime] plan: Plan,
) -> f32 {
    let columns = comptime!(plan.scaling.columns());
    let column = if comptime!(shared_by_tiles(columns)) {
        part.first_column
    } else {
        part.first_column + sum_column(unit, index, plan.instruction)
    };
    let place = part.right_start
        + u32::min(column, part.columns - 1u32) / columns * strides.right
        + step / comptime!(plan.scaling.steps(1)) * strides.right_inner;
    scale[place as usize]
}

/// The inverse scales of a unit's sums in a step of `wgmma`, read before the product is waited for.
#[derive(CubeType)]
pub(super) struct StepScales {
    /// Those of the unit's two rows.
    rows: Array<f32>,
    /// Those of its 32 columns, or one for all of them.
    columns: Array<f32>,
}

/// The inverse scales of a unit's rows and columns in a step, for one half of the tile. If scales are only applied to the sums,
/// nothing is read.
#[cube]
pub(super) fn step_scales(
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    part: &Part,
    strides: &Strides,
    unit: u32,
    step: u32,
    #[comptime] half: u32,
    #[comptime] plan: Plan,
) -> StepScales {
    let count = comptime!(plan.scaling.step_columns());
    let mut rows = Array::<f32>::new(2usize);
    let mut columns = Array::<f32>::new(count);
    if comptime!(plan.scales_steps()) {
        #[unroll]
        for row in 0..2usize {
            let index = comptime!(half * SUMS + 2 * row as u32);
            rows[row] = row_scale(lhs_scale, part, strides, unit, index, step, plan);
        }
        #[unroll]
        for column in 0..count {
            let index = comptime!((column / 2 * 4 + column % 2) as u32);
            columns[column] = column_scale(rhs_scale, part, strides, unit, index, step, plan);
        }
    }
    StepScales { rows, columns }
}

/// The factor of sum `index` of a unit in a step.
#[cube]
pub(super) fn step_factor(
    scales: &StepScales,
    #[comptime] index: usize,
    #[comptime] plan: Plan,
) -> f32 {
    let row = comptime!(index % 4 / 2);
    let column = comptime!((index / 4 * 2 + index % 2) % plan.scaling.step_columns());
    scales.rows[row] * scales.columns[column]
}

fn shared_by_tiles(size: u32) -> bool {
    size == u32::MAX || size.is_multiple_of(ROWS)
}
