//! Scaling and storing a unit's sums.

use cubecl::prelude::*;

use super::{
    layout::{sum_column, sum_row},
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
    let mut max = 0u32;
    #[unroll(!plan.emulated)]
    for pair in 0..comptime!(plan.sums() / 2) {
        let row = part.first_row + sum_row(unit, 2 * pair, plan.instruction);
        let column = part.first_column + sum_column(unit, 2 * pair, plan.instruction);
        if row < m && column < n {
            let first = finished::<F>(
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
            // The column beside it may lie beyond the edge.
            let second = finished::<F>(
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
            let matrix = CUBE_POS_Z as usize * m as usize * n as usize;
            let place = matrix + row as usize * n as usize + column as usize;
            let is_inside = column + 1 < n;
            if comptime!(size == 2) {
                let mut both = Vector::<F, N>::new(first);
                both.insert(1usize, second);
                output[place / 2] = both;
            } else {
                output[place] = Vector::new(first);
                if is_inside {
                    output[place + 1] = Vector::new(second);
                }
            }
            if comptime!(plan.has_amax) {
                max = u32::max(max, magnitude_bits(f32::cast_from(first)));
                if is_inside {
                    max = u32::max(max, magnitude_bits(f32::cast_from(second)));
                }
            }
        }
    }
    max
}

/// A sum, scaled and with the bias, as it is stored.
#[cube]
fn finished<F: Numeric>(
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
) -> F {
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
    float_to::<F>(value, plan.by_hand)
}
