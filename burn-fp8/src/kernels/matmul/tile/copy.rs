//! Copies from global to shared memory, which run while the tensor cores compute.

use cubecl::prelude::*;

use super::{
    layout::{ROW_CHUNKS, ROWS, UNITS, tile_word},
    plan::{Instruction, Plan},
};

/// The rows of an operand that a cube reads, in 16-byte chunks along the inner dimension.
#[derive(CubeType)]
pub(super) struct Side {
    /// Global address of the operand.
    pub(super) address: u64,
    /// Chunk where the matrix starts.
    pub(super) start: u32,
    /// Chunks from a row to the next.
    pub(super) pitch: u32,
    /// The first row read.
    pub(super) first: u32,
    /// Rows of the matrix.
    pub(super) rows: u32,
    /// Codes of a row.
    pub(super) length: u32,
}

/// The address of a buffer, in global memory.
#[cube]
pub(super) fn global_address(buffer: &[u32], #[comptime] plan: Plan) -> u64 {
    if comptime!(plan.emulated) {
        0u64.runtime()
    } else {
        let address: u64;
        gpu_asm!(
            "cvta.to.global.u64 {address}, {buffer};",
            address = out(_) address, buffer = mem_in(_) buffer.as_ptr(), options(explicit_mem)
        );
        address
    }
}

/// The address of the tiles, in shared memory.
#[cube]
pub(super) fn shared_address<T: CubePrimitive>(
    tiles: &mut Shared<[T]>,
    #[comptime] plan: Plan,
) -> u32 {
    if comptime!(plan.emulated) {
        0u32.runtime()
    } else {
        let address: u32;
        gpu_asm!(
            "{{ .reg .u64 shared; cvta.to.shared.u64 shared, {tiles}; cvt.u32.u64 {address}, shared; }}",
            address = out(_) address, tiles = mem_inout(_) tiles.as_mut_ptr(), options(explicit_mem)
        );
        address
    }
}

/// Starts a unit's copies for step `step` along the inner dimension: all units together copy 128 codes of 128 rows of both operands.
/// Emulated, one unit makes all copies. Codes outside a matrix become zeros.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn copy_tiles(
    lhs: &[u32],
    rhs: &[u32],
    left: &Side,
    right: &Side,
    tiles: &mut Shared<[u32]>,
    tiles_address: u32,
    step: u32,
    unit: u32,
    #[comptime] plan: Plan,
) {
    let stage = step % comptime!(plan.stages()) * comptime!(plan.stage_words());
    let copies = comptime!(ROWS * ROW_CHUNKS / plan.units());
    #[unroll(!plan.emulated)]
    for turn in 0..copies {
        let copy = if comptime!(plan.emulated) {
            turn
        } else {
            turn * UNITS + unit
        };
        let (row, chunk) = (copy / ROW_CHUNKS, copy % ROW_CHUNKS);
        let column = step * ROW_CHUNKS + chunk;
        let to = stage + tile_word(row, chunk * 4u32);
        copy_chunk(lhs, left, row, column, tiles, tiles_address, to, plan);
        let to = stage + tile_word(ROWS + row, chunk * 4u32);
        copy_chunk(rhs, right, row, column, tiles, tiles_address, to, plan);
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn copy_chunk(
    operand: &[u32],
    side: &Side,
    row: u32,
    column: u32,
    tiles: &mut Shared<[u32]>,
    tiles_address: u32,
    to: u32,
    #[comptime] plan: Plan,
) {
    let row = side.first + row;
    let inside = row < side.rows && column * 16u32 < side.length;
    let chunk = select(inside, side.start + row * side.pitch + column, 0u32);
    // The last chunk of a row may have fewer codes. The bytes behind them are undefined.
    let size = select(inside, u32::min(side.length - column * 16u32, 16u32), 0u32);
    if comptime!(plan.emulated) {
        for word in 0..4u32 {
            let mut value = 0u32;
            if word * 4u32 < size {
                let unused = 4u32 - u32::min(size - word * 4u32, 4u32);
                value =
                    operand[(chunk * 4u32 + word) as usize] & (0xFFFF_FFFFu32 >> (unused * 8u32));
            }
            tiles[(to + word) as usize] = value;
        }
    } else {
        let from = side.address + chunk as u64 * 16u64;
        let to = tiles_address + to * 4u32;
        gpu_asm!(
            "cp.async.cg.shared.global [{to}], [{from}], 16, {size};",
            to = in(_) to, from = in(_) from, size = in(_) size
        );
    }
}

/// Ends a group of copies. [`await_tiles`] waits for whole groups.
#[cube]
pub(super) fn commit_tiles(#[comptime] plan: Plan) {
    if comptime!(!plan.emulated) {
        gpu_asm!("cp.async.commit_group;");
    }
}

/// Waits until the oldest tiles in flight have arrived for every unit, and every unit is done with the tiles before them.
#[cube]
pub(super) fn await_tiles(#[comptime] plan: Plan) {
    if comptime!(!plan.emulated) {
        let younger = comptime!(plan.stages() - 2);
        gpu_asm!("cp.async.wait_group {younger};");
        if comptime!(matches!(plan.instruction, Instruction::Wgmma)) {
            // `wgmma` reads shared memory through another proxy than the one that copies write through.
            gpu_asm!("fence.proxy.async.shared::cta;");
        }
        sync_cube();
    }
}
