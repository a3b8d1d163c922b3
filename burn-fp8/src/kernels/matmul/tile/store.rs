//! Scaling and storing a unit's sums.

use cubecl::prelude::*;

use super::{
    layout::{SUMS, sum_column, sum_row},
    plan::Plan,
    scaling::{Part, Scaling, Strides, column_scale, row_scale},
};
use crate::kernels::codec::{float_to, magnitude_bits};

/// The number of elements that one store writes, for a product with so many columns.
///
/// A unit's sums are pairs of neighbors, which one store can write if every row begins with a whole pair. The units of a warp can
/// exchange pairs, and then write four neighbors each, if every row begins with whole fours.
pub(super) fn vector(columns: usize, exchanges: bool) -> usize {
    match columns {
        _ if columns.is_multiple_of(4) && exchanges => 4,
        _ if columns.is_multiple_of(2) => 2,
        _ => 1,
    }
}

/// Scales a unit's sums, adds the bias, and stores those that are part of the product. Returns the bits of their largest magnitude
/// if the plan has an amax, otherwise 0. All units of a warp must call this.
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
    let inverses = Inverses {
        lhs: 1.0f32 / lhs_scale[0],
        rhs: 1.0f32 / rhs_scale[0],
    };
    let mut max = 0u32;
    // All rows of a column, one after the other, so that they share its bias and scale.
    #[unroll(!plan.emulated)]
    for eight in 0..comptime!(SUMS / 8) {
        #[unroll]
        for row in 0..comptime!(2 * plan.halves()) {
            // A pair, and the one of the same row that is eight columns further on. They are computed also where they are not
            // stored: a branch around all of this would keep a warp from working ahead.
            let index = comptime!(row / 2 * SUMS + row % 2 * 2) + eight * 8u32;
            let row = part.first_row + sum_row(unit, index, plan.instruction);
            let column = part.first_column + sum_column(unit, index, plan.instruction);
            let near = finished(
                sums, index, column, unit, lhs_scale, rhs_scale, &inverses, bias, part, strides,
                plan,
            );
            let far = finished(
                sums,
                index + 4,
                column + 8,
                unit,
                lhs_scale,
                rhs_scale,
                &inverses,
                bias,
                part,
                strides,
                plan,
            );
            if comptime!(plan.has_amax) {
                let whole = comptime!(size > 1);
                max = u32::max(max, largest_inside(near, row, column, part, whole));
                max = u32::max(max, largest_inside(far, row, column + 8, part, whole));
            }
            if comptime!(size == 4) {
                let is_second = unit % 2u32 == 1;
                let four = fours::<F, N>(near, far, is_second, plan);
                let column = select(is_second, column + 6u32, column);
                if row < part.rows && column < part.columns {
                    output[place_of(row, column, part) / 4] = four;
                }
            } else {
                store_pair(near, row, column, output, part, plan);
                store_pair(far, row, column + 8, output, part, plan);
            }
        }
    }
    // Rounding keeps the order, so the largest one rounded is the largest of those stored.
    magnitude_bits(f32::cast_from(float_to::<F>(
        f32::reinterpret(max),
        plan.by_hand,
    )))
}

/// Stores two neighbors, together if every row begins with a whole pair.
#[cube]
fn store_pair<F: Numeric, N: Size>(
    pair: Vector<f32, Const<2>>,
    row: u32,
    column: u32,
    output: &mut [Vector<F, N>],
    part: &Part,
    #[comptime] plan: Plan,
) {
    let size = N::value();
    let first = float_to::<F>(pair.extract(0usize), plan.by_hand);
    let second = float_to::<F>(pair.extract(1usize), plan.by_hand);
    let place = place_of(row, column, part);
    let is_inside = row < part.rows && column < part.columns;
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
        if is_inside && column + 1 < part.columns {
            output[place + 1] = Vector::new(second);
        }
    }
}

/// The place of an element in the output.
#[cube]
fn place_of(row: u32, column: u32, part: &Part) -> usize {
    let (rows, columns) = (part.rows as usize, part.columns as usize);
    (part.product as usize * rows + row as usize) * columns + column as usize
}

/// The bits of the larger magnitude of two neighbors, of those that are part of the product: both or none if it has `whole` pairs.
#[cube]
fn largest_inside(
    pair: Vector<f32, Const<2>>,
    row: u32,
    column: u32,
    part: &Part,
    #[comptime] whole: bool,
) -> u32 {
    let first = magnitude_bits(pair.extract(0usize));
    let second = magnitude_bits(pair.extract(1usize));
    let is_inside = row < part.rows && column < part.columns;
    let larger = if comptime!(whole) {
        u32::max(first, second)
    } else {
        u32::max(first, select(column + 1 < part.columns, second, 0u32))
    };
    select(is_inside, larger, 0u32)
}

/// Four neighbors. Of two neighboring units, the first takes the near pairs of both, and the second the far ones.
#[cube]
fn fours<F: Numeric, N: Size>(
    near: Vector<f32, Const<2>>,
    far: Vector<f32, Const<2>>,
    is_second: bool,
    #[comptime] plan: Plan,
) -> Vector<F, N> {
    if comptime!(plan.half_output) {
        let near = rounded::<F>(near, plan);
        let far = rounded::<F>(far, plan);
        let (first, second) = exchanged(near, far, is_second);
        let mut words = Vector::<u32, Const<2>>::new(first);
        words.insert(1usize, second);
        Vector::<F, N>::reinterpret(words)
    } else {
        let mut words = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for place in 0..2usize {
            let near = u32::reinterpret(near.extract(place));
            let far = u32::reinterpret(far.extract(place));
            let (first, second) = exchanged(near, far, is_second);
            words.insert(place, first);
            words.insert(comptime!(place + 2), second);
        }
        Vector::<F, N>::reinterpret(words)
    }
}

/// A pair in the dtype of the output, of 16 bits.
#[cube]
fn rounded<F: Numeric>(pair: Vector<f32, Const<2>>, #[comptime] plan: Plan) -> u32 {
    let first = float_to::<F>(pair.extract(0usize), plan.by_hand);
    let mut rounded = Vector::<F, Const<2>>::new(first);
    rounded.insert(1usize, float_to::<F>(pair.extract(1usize), plan.by_hand));
    u32::reinterpret(rounded)
}

/// The near words of this unit and of its neighbor, or if this is the second of the two, the far words of the neighbor and of this.
/// The neighbors are units 0 and 1 of a warp, 2 and 3, and so on.
#[cube]
fn exchanged(near: u32, far: u32, is_second: bool) -> (u32, u32) {
    let kept = select(is_second, far, near);
    let given = select(is_second, near, far);
    let taken: u32;
    // Not by `plane_shuffle_xor`, which asks only the units that happen to run together.
    gpu_asm!(
        "shfl.sync.bfly.b32 {taken}, {given}, 1, 0x1f, 0xffffffff;",
        taken = out(_) taken, given = in(_) given, options(nomem)
    );
    (
        select(is_second, taken, kept),
        select(is_second, kept, taken),
    )
}

/// The inverse scales of both operands, if each has one.
#[derive(CubeType, Clone, Copy)]
struct Inverses {
    lhs: f32,
    rhs: f32,
}

/// Two neighboring sums, scaled and with the bias.
#[cube]
fn finished(
    sums: &Array<f32>,
    index: u32,
    column: u32,
    unit: u32,
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    inverses: &Inverses,
    bias: &[f32],
    part: &Part,
    strides: &Strides,
    #[comptime] plan: Plan,
) -> Vector<f32, Const<2>> {
    let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
    #[unroll]
    for place in 0..2usize {
        let index = index + comptime!(place as u32);
        let mut value = sums[index as usize];
        if comptime!(matches!(plan.scaling, Scaling::Whole)) {
            value = value * inverses.lhs * inverses.rhs;
        } else if comptime!(!plan.scales_steps()) {
            // One after the other, because the product of two small ones may be too small for f32.
            value *= row_scale(lhs_scale, part, strides, unit, index, 0u32, plan);
            value *= column_scale(rhs_scale, part, strides, unit, index, 0u32, plan);
        }
        if comptime!(plan.has_bias) {
            let column = column + comptime!(place as u32);
            value += bias[u32::min(column, part.columns - 1) as usize];
        }
        pair.insert(place, value);
    }
    pair
}
