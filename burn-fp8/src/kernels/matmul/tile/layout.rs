//! The places of elements in shared memory, and in the registers of the units that run an instruction together.
//!
//! Plain arithmetic, that the kernel and the tests below both run. What the instructions ask for is in the PTX ISA,
//! "Matrix Fragments for mma.m16n8k32", "Register Fragments for wgmma.mma_async.m64nNk8, m64nNk32" and "Matrix
//! Descriptor Format".

use cubecl::prelude::*;

use super::plan::Instruction;

/// Rows of the product that a cube computes at a time. Its tile has as many rows, or [twice as many](TALL_ROWS).
pub(super) const ROWS: u32 = 128;
/// Rows of a tall tile, which a cube computes in two halves.
///
/// A Hopper multiprocessor multiplies 4,096 pairs of codes a cycle. At that rate a cube with a tile of 128 by 128 reads 64 bytes a
/// cycle from the L2 cache, one with a tall tile 48, and one of two in a cluster, which share the rows of theirs, 32.
pub(super) const TALL_ROWS: u32 = 2 * ROWS;
/// Columns of the product that a cube computes.
pub(super) const COLUMNS: u32 = 128;
/// Units of a cube: eight warps, two warpgroups, of which each computes 64 of every 128 rows.
pub(super) const UNITS: u32 = 256;
/// Sums that a unit keeps for every 128 rows.
pub(super) const SUMS: u32 = ROWS * COLUMNS / UNITS;
/// Terms of a sum that a tile holds.
pub(super) const STEP: u32 = 128;
/// Words of a row of a tile.
pub(super) const ROW_WORDS: u32 = STEP / 4;
/// Chunks of 16 bytes in a row of a tile. One copy moves a chunk.
pub(super) const ROW_CHUNKS: u32 = ROW_WORDS / 4;

/// Rows of tiles in a group of tiles that are computed together.
///
/// Cubes run roughly in the order of their numbers. If the numbers followed whole rows of tiles, the cubes that run at the same time
/// would read one row of the left operand and all of the right one. In groups they read a few rows and columns, which fit into
/// the cache. CUTLASS and Triton order tiles in the same way.
const GROUP: u32 = 8;

/// The row of tiles that cube `number` of a grid of `down` by `across` computes.
#[cube]
pub(super) fn tile_row(number: u32, across: u32, down: u32) -> u32 {
    let first = number / (GROUP * across) * GROUP;
    first + number % (GROUP * across) % u32::min(GROUP, down - first)
}

/// The column of tiles that cube `number` computes.
#[cube]
pub(super) fn tile_column(number: u32, across: u32, down: u32) -> u32 {
    let first = number / (GROUP * across) * GROUP;
    number % (GROUP * across) / u32::min(GROUP, down - first)
}

/// The place of word `word` of row `row` of a tile. Rows have 128 bytes, and their chunks are permuted by the row's
/// number (the 128-byte swizzle), so that the same chunk of eight neighboring rows lies in eight groups of banks.
#[cube]
pub(super) fn tile_word(row: u32, word: u32) -> u32 {
    row * 32u32 + (word ^ (row % 8u32 * 4u32))
}

/// `mma.sync`: the row, out of 16, of the left operand that register `register` of a lane holds.
#[cube]
pub(super) fn left_row(lane: u32, register: u32) -> u32 {
    lane / 4u32 + register % 2u32 * 8u32
}

/// `mma.sync`: the word of that row's 32 codes that the register holds.
#[cube]
pub(super) fn left_word(lane: u32, register: u32) -> u32 {
    lane % 4u32 + register / 2u32 * 4u32
}

/// `mma.sync`: the column, out of 8, of the right operand that a lane's registers hold.
#[cube]
pub(super) fn right_column(lane: u32) -> u32 {
    lane / 4u32
}

/// `mma.sync`: the word of that column's 32 codes that register `register` holds.
#[cube]
pub(super) fn right_word(lane: u32, register: u32) -> u32 {
    lane % 4u32 + register * 4u32
}

/// The row of sum `index` of a unit in the cube's part of the product.
#[cube]
pub(super) fn sum_row(unit: u32, index: u32, #[comptime] instruction: Instruction) -> u32 {
    let sixteen = if comptime!(matches!(instruction, Instruction::Mma)) {
        // A warp computes four blocks of 16 rows.
        index % SUMS / 16u32
    } else {
        // Each of a warpgroup's four warps has 16 rows.
        unit / 32u32 % 4u32
    };
    index / SUMS * ROWS
        + unit / 128u32 * 64u32
        + sixteen * 16u32
        + unit % 32u32 / 4u32
        + index % 4u32 / 2u32 * 8u32
}

/// The column of sum `index` of a unit in the cube's part of the product.
#[cube]
pub(super) fn sum_column(unit: u32, index: u32, #[comptime] instruction: Instruction) -> u32 {
    let eight = if comptime!(matches!(instruction, Instruction::Mma)) {
        // Each of the four warps over the same rows computes four blocks of 8 columns.
        unit / 32u32 % 4u32 * 4u32 + index / 4u32 % 4u32
    } else {
        index % SUMS / 4u32
    };
    eight * 8u32 + unit % 4u32 * 2u32 + index % 2u32
}

/// `wgmma`: the descriptor of a matrix in shared memory, at a byte address that is a multiple of 1024.
///
/// Bits 0 to 13 are the address, in units of 16 bytes like all sizes here. Bits 16 to 29 are the offset of the leading dimension,
/// which this layout does not use. Bits 32 to 45 are the distance from eight rows to the next eight, 1024 bytes. Bits 62 and 63
/// are 1, the 128-byte swizzle.
#[cube]
pub(super) fn descriptor(address: u32) -> u64 {
    ((address & 0x3FFFFu32) >> 4u32) as u64 | 0x4000_0040_0001_0000u64
}

/// `wgmma`: the word of shared memory that the instruction reads as word `word` of row `row` of a described matrix.
#[cube]
pub(super) fn described_word(descriptor: u64, row: u32, word: u32) -> u32 {
    let start = ((descriptor & 0x3FFFu64) as u32) << 2u32;
    let eight_rows = (((descriptor >> 32u64) & 0x3FFFu64) as u32) << 2u32;
    let place = start + row / 8u32 * eight_rows + row % 8u32 * 32u32 + word;
    // The swizzle: bits 7 to 9 of the address are XORed into bits 4 to 6.
    place ^ ((place / 32u32) % 8u32 * 4u32)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The PTX ISA's own formulas for the m16n8k32 fragments of 8-bit elements, element by element.
    #[test]
    fn mma_fragments_are_those_of_the_ptx_isa() {
        for lane in 0..32 {
            let (group, member) = (lane / 4, lane % 4);
            for i in 0..16 {
                // "row = groupID for 0 <= i < 4 || 8 <= i < 12, groupID + 8 otherwise;
                //  col = threadID_in_group * 4 + (i & 3), + 16 for i >= 8"
                let row = if i < 4 || (8..12).contains(&i) {
                    group
                } else {
                    group + 8
                };
                let column = member * 4 + (i & 3) + if i < 8 { 0 } else { 16 };
                assert_eq!(left_row(lane, i / 4), row);
                assert_eq!(left_word(lane, i / 4) * 4 + i % 4, column);
            }
            for i in 0..8 {
                // "row = threadID_in_group * 4 + (i & 3), + 16 for i >= 4; col = groupID"
                let row = member * 4 + (i & 3) + if i < 4 { 0 } else { 16 };
                assert_eq!(right_word(lane, i / 4) * 4 + i % 4, row);
                assert_eq!(right_column(lane), group);
            }
        }
    }

    /// The PTX ISA's formulas for the accumulators: m16n8 within a warp's part, m64n128 within a warpgroup's. A tall tile has two
    /// such parts, one below the other.
    #[test]
    fn sums_are_where_the_ptx_isa_puts_them() {
        for unit in 0..UNITS {
            let (lane, warp) = (unit % 32, unit / 32);
            for index in 0..2 * SUMS {
                let (half, index) = (index / SUMS, index % SUMS);
                let i = index % 4;
                // "row = groupID for c0, c1, groupID + 8 for c2, c3; col = threadID_in_group * 2 + (i & 1)"
                let row = lane / 4 + if i < 2 { 0 } else { 8 };
                let column = lane % 4 * 2 + (i & 1);
                let mma = [
                    warp / 4 * 64 + index / 16 * 16,
                    warp % 4 * 32 + index / 4 % 4 * 8,
                ];
                let wgmma = [warp / 4 * 64 + warp % 4 * 16, index / 4 * 8];
                for (instruction, [first_row, first_column]) in
                    [(Instruction::Mma, mma), (Instruction::Wgmma, wgmma)]
                {
                    let number = half * SUMS + index;
                    let row = half * 128 + first_row + row;
                    assert_eq!(sum_row(unit, number, instruction), row);
                    assert_eq!(sum_column(unit, number, instruction), first_column + column);
                }
            }
        }
    }

    #[test]
    fn every_element_of_the_product_has_one_owner() {
        for (instruction, rows) in [
            (Instruction::Mma, ROWS),
            (Instruction::Wgmma, ROWS),
            (Instruction::Wgmma, TALL_ROWS),
        ] {
            let sums = rows * COLUMNS / UNITS;
            let owned: HashSet<_> = (0..UNITS)
                .flat_map(|unit| (0..sums).map(move |index| (unit, index)))
                .map(|(unit, index)| {
                    let row = sum_row(unit, index, instruction);
                    let column = sum_column(unit, index, instruction);
                    assert!(row < rows && column < COLUMNS);
                    (row, column)
                })
                .collect();
            assert_eq!(owned.len() as u32, rows * COLUMNS);
        }
    }

    #[test]
    fn every_tile_has_one_cube_and_neighbours_are_close() {
        for (across, down) in [(1, 1), (3, 5), (5, 8), (7, 20), (40, 17)] {
            let tiles: Vec<_> = (0..across * down)
                .map(|number| {
                    let row = tile_row(number, across, down);
                    (row, tile_column(number, across, down))
                })
                .collect();
            assert!(
                tiles
                    .iter()
                    .all(|&(row, column)| row < down && column < across)
            );
            assert_eq!(tiles.iter().collect::<HashSet<_>>().len(), tiles.len());
            // The tiles that fill a large GPU read about as many rows as columns.
            if (across, down) == (40, 17) {
                let rows: HashSet<_> = tiles[..128].iter().map(|tile| tile.0).collect();
                let columns: HashSet<_> = tiles[..128].iter().map(|tile| tile.1).collect();
                assert_eq!((rows.len(), columns.len()), (8, 16));
            }
        }
    }

    #[test]
    fn a_tile_uses_every_word_once_and_no_bank_twice() {
        let words: HashSet<_> = (0..ROWS)
            .flat_map(|row| (0..ROW_WORDS).map(move |word| tile_word(row, word)))
            .collect();
        assert_eq!(words.len() as u32, ROWS * ROW_WORDS);
        assert_eq!(words.iter().max(), Some(&(ROWS * ROW_WORDS - 1)));
        // A warp reads one register of a fragment: 8 rows, 4 neighbouring words.
        for first in (0..ROW_WORDS).step_by(4) {
            let banks: HashSet<_> = (0..32)
                .map(|lane| tile_word(lane / 4, first + lane % 4) % 32)
                .collect();
            assert_eq!(banks.len(), 32);
        }
    }

    /// What a descriptor means, walked over four instructions of 32 bytes, is where the copies put the codes.
    #[test]
    fn a_descriptor_finds_what_was_copied() {
        for tile in 0..8 {
            let first = tile * 64 * ROW_WORDS;
            let descriptor = descriptor(first * 4);
            for row in 0..64 {
                for word in 0..ROW_WORDS {
                    let (step, within) = (word / 8, word % 8);
                    let read = described_word(descriptor + 2 * u64::from(step), row, within);
                    assert_eq!(read, first + tile_word(row, word));
                }
            }
        }
    }
}
