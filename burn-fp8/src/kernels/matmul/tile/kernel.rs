use cubecl::prelude::*;

use super::{
    copy::{Side, await_tiles, commit_tiles, copy_tiles, global_address, shared_address},
    instruction::multiply_tiles,
    layout::{STEP, SUMS, UNITS, sum_column, sum_row},
    plan::Plan,
    scaling::{Part, Strides, part, start},
    store::store_sums,
};
use crate::kernels::amax::{raise, raise_together};

/// Each cube computes 128 rows and columns of a product. The inner dimension of both operands is innermost, in chunks of 16 codes.
/// Tiles of 128 codes are copied ahead, in as many stages as fit into shared memory. The scales are inverse scales, except if
/// an operand has a single one.
#[cube(launch)]
pub(super) fn tile_kernel<F: Numeric, V: Size>(
    lhs: &[u32],
    rhs: &[u32],
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    bias: &[f32],
    starts: &[u32],
    amax: &[Atomic<u32>],
    output: &mut [Vector<F, V>],
    lhs_pitch: u32,
    rhs_pitch: u32,
    strides: Strides,
    m: u32,
    n: u32,
    k: u32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let number = CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y;
    let part = part(starts, number * CUBE_COUNT_X + CUBE_POS_X, m, n, plan);
    let left = Side {
        address: global_address(lhs, plan),
        start: start(starts, part.product, 0usize, plan),
        pitch: lhs_pitch,
        first: part.first_row,
        rows: m,
        length: k,
    };
    let right = Side {
        address: global_address(rhs, plan),
        start: start(starts, part.product, 1usize, plan),
        pitch: rhs_pitch,
        first: part.first_column,
        rows: n,
        length: k,
    };
    let mut tiles = Shared::<[u32]>::new_aligned_slice(comptime!(plan.words()), 1024usize);
    let tiles_address = shared_address::<u32>(&mut tiles, plan);
    if comptime!(plan.emulated) {
        for unit in 0..UNITS {
            // For speed, units without a part of the product are skipped.
            let row = left.first + sum_row(unit, 0u32, plan.instruction);
            let column = right.first + sum_column(unit, 0u32, plan.instruction);
            if row < m && column < n {
                let sums = sum_tiles(
                    lhs,
                    rhs,
                    &left,
                    &right,
                    &mut tiles,
                    tiles_address,
                    lhs_scale,
                    rhs_scale,
                    &part,
                    &strides,
                    unit,
                    plan,
                );
                let max = store_sums(
                    &sums, unit, lhs_scale, rhs_scale, bias, output, &part, &strides, plan,
                );
                if comptime!(plan.has_amax) {
                    raise(amax, 0usize, max);
                }
            }
        }
    } else {
        let sums = sum_tiles(
            lhs,
            rhs,
            &left,
            &right,
            &mut tiles,
            tiles_address,
            lhs_scale,
            rhs_scale,
            &part,
            &strides,
            UNIT_POS,
            plan,
        );
        let max = store_sums(
            &sums, UNIT_POS, lhs_scale, rhs_scale, bias, output, &part, &strides, plan,
        );
        if comptime!(plan.has_amax) {
            raise_together(amax, max, comptime!(plan.units() as usize));
        }
    }
}

/// A unit's sums over the whole inner dimension.
#[cube]
fn sum_tiles(
    lhs: &[u32],
    rhs: &[u32],
    left: &Side,
    right: &Side,
    tiles: &mut Shared<[u32]>,
    tiles_address: u32,
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    part: &Part,
    strides: &Strides,
    unit: u32,
    #[comptime] plan: Plan,
) -> Array<f32> {
    let mut sums = Array::<f32>::new(comptime!(SUMS as usize));
    #[unroll]
    for index in 0..comptime!(SUMS as usize) {
        sums[index] = 0.0f32;
    }
    let ahead = comptime!(plan.stages() - 1);
    let steps = left.length.div_ceil(STEP);
    #[unroll(!plan.emulated)]
    for step in 0..ahead {
        if step < steps {
            copy_tiles(
                lhs,
                rhs,
                left,
                right,
                tiles,
                tiles_address,
                step,
                unit,
                plan,
            );
        }
        commit_tiles(plan);
    }
    for step in 0..steps {
        await_tiles(plan);
        if step + ahead < steps {
            let step = step + ahead;
            copy_tiles(
                lhs,
                rhs,
                left,
                right,
                tiles,
                tiles_address,
                step,
                unit,
                plan,
            );
        }
        // Committed even if it is empty, so that the number of groups in flight tells their age.
        commit_tiles(plan);
        multiply_tiles(
            &*tiles,
            tiles_address,
            unit,
            &mut sums,
            lhs_scale,
            rhs_scale,
            part,
            strides,
            step,
            plan,
        );
    }
    sums
}
