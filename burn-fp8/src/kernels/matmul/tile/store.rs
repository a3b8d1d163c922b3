//! Scaling and storing a unit's sums.

use cubecl::prelude::*;

use super::{
    layout::{SUMS, sum_column, sum_row},
    plan::Plan,
    scaling::{Part, Scaling, Strides, column_scale, row_scale},
};
use crate::kernels::codec::{float_to, magnitude_bits};

/// The number of elements that one store writes, for a product with so many columns. A unit's sums are pairs of neighbors, which
/// one store can write if every row begins with a whole pair.
pub(super) fn vector(columns: usize) -> usize {
    match columns.is_multiple_of(2) {
        true => 2,
        false => 1,
    }
}

/// Scales a unit's sums, adds the bias, and stores those that are part of the product. Returns the bits of their largest magnitude
/// if the plan has an amax, otherwise 0.
#[cube]
pub(super) fn store_sums<F: Numeric, N: Size>(
    sums: &Array<f32>,
    unit: u32,
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    bias: &[f32],
    output: &mut [Vector<F, N>],
    part: &Part,
    strides: &Strides,
    #[comptime] plan: Plan,
) -> u32 {
    let size = N::value();
    let (m, n) = (part.rows, part.columns);
    let lhs_inverse = 1.0f32 / lhs_scale[0];
    let rhs_inverse = 1.0f32 / rhs_scale[0];
    let matrix = part.product as usize * m as usize * n as usize;
    let mut max = 0u32;
    // All rows of a column, one after the other, so that they share its bias and scale.
    #[unroll(!plan.emulated)]
    for index in 0..comptime!(SUMS / 2) {
        #[unroll]
        for half in 0..comptime!(plan.halves()) {
            let pair = half * comptime!(SUMS / 2) + index;
            let row = part.first_row + sum_row(unit, 2 * pair, plan.instruction);
            let column = part.first_column + sum_column(unit, 2 * pair, plan.instruction);
            // Also where they are not stored: a branch around all of this would keep the units of a warp from working ahead.
            let first = finished(
                sums,
                2 * pair,
                column,
                unit,
                lhs_scale,
                rhs_scale,
                lhs_inverse,
                rhs_inverse,
                bias,
                part,
                strides,
                plan,
            );
            let second = finished(
                sums,
                2 * pair + 1,
                column + 1,
                unit,
                lhs_scale,
                rhs_scale,
                lhs_inverse,
                rhs_inverse,
                bias,
                part,
                strides,
                plan,
            );
            let is_inside = row < m && column < n;
            // The column beside it may lie beyond the edge, if they are not stored together.
            let are_inside = if comptime!(size == 2) {
                is_inside
            } else {
                row < m && column + 1 < n
            };
            let place = matrix + row as usize * n as usize + column as usize;
            if comptime!(plan.has_amax) {
                let first = select(is_inside, magnitude_bits(first), 0u32);
                let second = select(are_inside, magnitude_bits(second), 0u32);
                max = u32::max(max, u32::max(first, second));
            }
            let first = float_to::<F>(first, plan.by_hand);
            let second = float_to::<F>(second, plan.by_hand);
            if comptime!(size == 2) {
                let mut both = Vector::<F, N>::new(first);
                both.insert(1usize, second);
                if is_inside {
                    output[place / 2] = both;
                }
            } else {
                if is_inside {
                    output[place] = Vector::new(first);
                }
                if are_inside {
                    output[place + 1] = Vector::new(second);
                }
            }
        }
    }
    // Rounding keeps the order, so the largest one rounded is the largest of those stored.
    magnitude_bits(f32::cast_from(float_to::<F>(
        f32::reinterpret(max),
        plan.by_hand,
    )))
}

/// A sum, scaled and with the bias.
#[cube]
fn finished(
    sums: &Array<f32>,
    index: u32,
    column: u32,
    unit: u32,
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    lhs_inverse: f32,
    rhs_inverse: f32,
    bias: &[f32],
    part: &Part,
    strides: &Strides,
    #[comptime] plan: Plan,
) -> f32 {
    let mut value = sums[index as usize];
    if comptime!(matches!(plan.scaling, Scaling::Whole)) {
        value = value * lhs_inverse * rhs_inverse;
    } else if comptime!(!plan.scales_steps()) {
        // One after the other, because the product of two small ones may be too small for f32.
        value *= row_scale(lhs_scale, part, strides, unit, index, 0u32, plan);
        value *= column_scale(rhs_scale, part, strides, unit, index, 0u32, plan);
    }
    if comptime!(plan.has_bias) {
        value += bias[u32::min(column, part.columns - 1) as usize];
    }
    value
}
