//! The tensor-core instructions, and the loops that replace them where they are emulated.

use cubecl::prelude::*;

use super::{
    layout::{
        ROW_WORDS, ROWS, SUMS, described_word, descriptor, left_row, left_word, right_column,
        right_word, sum_column, sum_row, tile_word,
    },
    plan::{Instruction, Plan},
    scaling::{Part, StepScales, Strides, factor, step_factor, step_scales},
};
use crate::kernels::codec::{decode, ptx_name};

/// Adds a unit's part of the product of a step's tiles (128 terms) to its sums.
///
/// The tensor cores of Ada and Hopper add fp8 products with about 14 bits. So the accumulators start at zero in every step,
/// and their values after 128 terms are added to the sums in f32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
#[cube]
pub(super) fn multiply_tiles(
    tiles: &Shared<[u32]>,
    tiles_address: u32,
    unit: u32,
    sums: &mut Array<f32>,
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    part: &Part,
    strides: &Strides,
    step: u32,
    #[comptime] plan: Plan,
) {
    let stage = step % comptime!(plan.stages());
    let left = stage * comptime!(plan.stage_words());
    let right = left + comptime!(ROWS * ROW_WORDS);
    if comptime!(matches!(plan.instruction, Instruction::Mma)) {
        let rows = left + unit / 128u32 * comptime!(64 * ROW_WORDS);
        let columns = right + unit / 32u32 % 4u32 * comptime!(32 * ROW_WORDS);
        #[unroll(!plan.emulated)]
        for block in 0..16u32 {
            let rows = rows + block / 4u32 * comptime!(16 * ROW_WORDS);
            let columns = columns + block % 4u32 * comptime!(8 * ROW_WORDS);
            let mut terms = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll(!plan.emulated)]
            for quarter in 0..4u32 {
                terms = multiply_block(tiles, rows, columns, quarter, unit % 32u32, terms, plan);
            }
            #[unroll]
            for index in 0..4usize {
                let number = block * 4u32 + comptime!(index as u32);
                let mut sum = terms.extract(index);
                if comptime!(plan.scales_steps()) {
                    sum *= factor(
                        lhs_scale, rhs_scale, part, strides, unit, number, step, plan,
                    );
                }
                sums[number as usize] += sum;
            }
        }
    } else {
        let rows = left + unit / 128u32 * comptime!(64 * ROW_WORDS);
        let left = descriptor(tiles_address + rows * 4u32);
        let right = descriptor(tiles_address + right * 4u32);
        if comptime!(plan.emulated) {
            for index in 0..SUMS {
                let row = sum_row(unit, index, plan.instruction) % 64u32;
                let column = sum_column(unit, index, plan.instruction);
                let mut sum = emulated_wgmma(tiles, left, right, row, column, plan);
                if comptime!(plan.scales_steps()) {
                    sum *= factor(lhs_scale, rhs_scale, part, strides, unit, index, step, plan);
                }
                sums[index as usize] += sum;
            }
        } else {
            let scales = step_scales(lhs_scale, rhs_scale, part, strides, unit, step, 0u32, plan);
            let terms = wgmma(left, right, plan);
            add_terms(&terms, sums, &scales, 0u32, plan);
        }
    }
}

/// Adds the result of [`wgmma`] in a step to a unit's sums of one half of the tile.
#[cube]
pub(super) fn add_terms(
    terms: &Vector<f32, Const<64>>,
    sums: &mut Array<f32>,
    scales: &StepScales,
    #[comptime] half: u32,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for index in 0..comptime!(SUMS as usize) {
        let mut sum = terms.extract(index);
        if comptime!(plan.scales_steps()) {
            sum *= step_factor(scales, index, plan);
        }
        sums[comptime!((half * SUMS) as usize + index)] += sum;
    }
}

/// `part` plus a lane's part of the product of 16 rows and 8 columns over 32 terms.
#[cube]
fn multiply_block(
    tiles: &Shared<[u32]>,
    rows: u32,
    columns: u32,
    step: u32,
    lane: u32,
    part: Vector<f32, Const<4>>,
    #[comptime] plan: Plan,
) -> Vector<f32, Const<4>> {
    if comptime!(plan.emulated) {
        emulated_mma(tiles, rows, columns, step, lane, part, plan)
    } else {
        let left = left_fragment(tiles, rows, step, lane);
        let right = right_fragment(tiles, columns, step, lane);
        mma(&left, &right, &part, plan)
    }
}

/// A lane's registers with its codes of the left operand.
#[cube]
fn left_fragment(tiles: &Shared<[u32]>, rows: u32, step: u32, lane: u32) -> Vector<u32, Const<4>> {
    let mut fragment = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for register in 0..4usize {
        let number = comptime!(register as u32);
        fragment.insert(register, left_codes(tiles, rows, step, lane, number));
    }
    fragment
}

/// A lane's registers with its codes of the right operand.
#[cube]
fn right_fragment(
    tiles: &Shared<[u32]>,
    columns: u32,
    step: u32,
    lane: u32,
) -> Vector<u32, Const<2>> {
    let mut fragment = Vector::<u32, Const<2>>::new(0u32);
    #[unroll]
    for register in 0..2usize {
        let number = comptime!(register as u32);
        fragment.insert(register, right_codes(tiles, columns, step, lane, number));
    }
    fragment
}

#[cube]
fn left_codes(tiles: &Shared<[u32]>, rows: u32, step: u32, lane: u32, register: u32) -> u32 {
    let word = step * 8u32 + left_word(lane, register);
    tiles[(rows + tile_word(left_row(lane, register), word)) as usize]
}

#[cube]
fn right_codes(tiles: &Shared<[u32]>, columns: u32, step: u32, lane: u32, register: u32) -> u32 {
    let word = step * 8u32 + right_word(lane, register);
    tiles[(columns + tile_word(right_column(lane), word)) as usize]
}

/// The arguments come by reference, because `gpu_asm!` would take the address of a variable.
#[cube]
fn mma(
    left: &Vector<u32, Const<4>>,
    right: &Vector<u32, Const<2>>,
    part: &Vector<f32, Const<4>>,
    #[comptime] plan: Plan,
) -> Vector<f32, Const<4>> {
    let lhs = comptime!(ptx_name(plan.lhs));
    let rhs = comptime!(ptx_name(plan.rhs));
    let sum: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k32.row.col.f32.{lhs}.{rhs}.f32 {sum}, {left}, {right}, {part};",
        sum = out(_) sum, left = in(_) *left, right = in(_) *right, part = in(_) *part,
        options(pure, nomem)
    );
    sum
}

/// The result of [`mma`] for a lane, from its own codes and those of the lanes that hold the rest of its rows and columns.
#[cube]
fn emulated_mma(
    tiles: &Shared<[u32]>,
    rows: u32,
    columns: u32,
    step: u32,
    lane: u32,
    part: Vector<f32, Const<4>>,
    #[comptime] plan: Plan,
) -> Vector<f32, Const<4>> {
    let mut sums = Array::<f32>::new(4usize);
    #[unroll]
    for index in 0..4usize {
        sums[index] = part.extract(index);
    }
    for index in 0..4u32 {
        let column = lane % 4u32 * 2u32 + index % 2u32;
        let mut sum = sums[index as usize];
        for member in 0..4u32 {
            for half in 0..2u32 {
                let owner = lane / 4u32 * 4u32 + member;
                let x = left_codes(tiles, rows, step, owner, index / 2u32 + half * 2u32);
                let y = right_codes(tiles, columns, step, column * 4u32 + member, half);
                sum += dot(x, y, plan);
            }
        }
        sums[index as usize] = accumulated(sum);
    }
    let mut result = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for index in 0..4usize {
        result.insert(index, sums[index]);
    }
    result
}

/// The product of 64 rows and 128 columns, given by two descriptors, over 128 terms, computed by the 128 units of a warpgroup.
///
/// There are four instructions, each 32 codes (two units of a descriptor's address) further than the one before. The first
/// overwrites the accumulators.
#[cube]
pub(super) fn wgmma(left: u64, right: u64, #[comptime] plan: Plan) -> Vector<f32, Const<64>> {
    let lhs = comptime!(ptx_name(plan.lhs));
    let rhs = comptime!(ptx_name(plan.rhs));
    let part: Vector<f32, Const<64>>;
    gpu_asm!(
        "{{",
        ".reg .pred sums, replaces; .reg .b32 zero; .reg .b64 a, b;",
        "mov.b32 zero, 0; setp.ne.b32 replaces, zero, 0; setp.eq.b32 sums, zero, 0;",
        "wgmma.fence.sync.aligned;",
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.{lhs}.{rhs} {part}, {left}, {right}, replaces, 1, 1;",
        "add.s64 a, {left}, 2; add.s64 b, {right}, 2;",
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.{lhs}.{rhs} {part}, a, b, sums, 1, 1;",
        "add.s64 a, {left}, 4; add.s64 b, {right}, 4;",
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.{lhs}.{rhs} {part}, a, b, sums, 1, 1;",
        "add.s64 a, {left}, 6; add.s64 b, {right}, 6;",
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.{lhs}.{rhs} {part}, a, b, sums, 1, 1;",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        "}}",
        part = out(_) part, left = in(_) left, right = in(_) right
    );
    part
}

/// The result of [`wgmma`] for one row and column: four instructions over the codes that the descriptors point to.
#[cube]
fn emulated_wgmma(
    tiles: &Shared<[u32]>,
    left: u64,
    right: u64,
    row: u32,
    column: u32,
    #[comptime] plan: Plan,
) -> f32 {
    let mut sum = 0.0f32;
    for step in 0..4u64 {
        for word in 0..8u32 {
            let x = tiles[described_word(left + step * 2u64, row, word) as usize];
            let y = tiles[described_word(right + step * 2u64, column, word) as usize];
            sum += dot(x, y, plan);
        }
        sum = accumulated(sum);
    }
    sum
}

/// A sum as an accumulator of the tensor cores keeps it: cut to 14 significant bits.
#[cube]
fn accumulated(sum: f32) -> f32 {
    f32::reinterpret(u32::reinterpret(sum) & 0xFFFF_FC00u32)
}

/// The sum of the products of four codes.
#[cube]
fn dot(x: u32, y: u32, #[comptime] plan: Plan) -> f32 {
    let mut sum = 0.0f32;
    for byte in 0..4u32 {
        let left = decode(x >> (8u32 * byte), plan.lhs);
        let right = decode(y >> (8u32 * byte), plan.rhs);
        sum += left * right;
    }
    sum
}
