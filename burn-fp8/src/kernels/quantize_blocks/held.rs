//! Casts that hold the floats in registers from the amax of a block to its codes: one kernel, one read, no atomics.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{client::Client, prelude::*, std::FastDivmod};

use super::super::{
    blocks::{Blocks, Grid},
    buffer,
    codec::{Codec, Four, encode, largest_lane, magnitudes},
    input,
    rows::Rows,
    scale::scale_of,
    tiles::{self, Tile},
};
use crate::Fp8Cast;

/// The number of units of a cube, on devices that allow so many.
const UNITS: usize = 256;

/// The number of pieces side by side, of four columns each. Together they are whole sectors of a GPU's memory.
const ACROSS: usize = 8;

/// The number of fours that a unit has registers for, and the number that it should have, because one load would not fill the
/// path to a GPU's memory.
const MOST: usize = 32;
const ENOUGH: usize = 4;

/// The units that cast a patch together. A patch is a block, or 32 blocks side by side if blocks are one column wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Team {
    units: usize,
    /// The number of teams in a cube.
    teams: usize,
    /// The number of pieces that each unit holds.
    pieces: usize,
    /// The number of rows of a piece: those of a tile if codes are transposed, otherwise one.
    rows: usize,
    /// Whether blocks are one column wide, so that each column has an amax of its own.
    narrow: bool,
}

impl Team {
    /// `None` if a cube's units cannot hold a block, if words would have codes of two rows or blocks, on devices with fewer units
    /// in a cube, and on processors, where units that wait for each other cost more than a second read.
    pub(super) fn of(client: &Client, blocks: &Blocks, by_columns: bool) -> Option<Self> {
        let hardware = &client.properties().hardware;
        match hardware.num_cpu_cores.is_none() && hardware.max_units_per_cube >= UNITS as u32 {
            true => Self::holding(blocks, by_columns, UNITS),
            false => None,
        }
    }

    /// The team for cubes of `cube` units, which is a power of two from `ACROSS` on.
    pub(super) fn holding(blocks: &Blocks, by_columns: bool, cube: usize) -> Option<Self> {
        let [block_rows, block_columns] = blocks.block;
        let rows = if by_columns { tiles::ROWS } else { 1 };
        let narrow = block_columns == 1;
        let by_fours = narrow || blocks.by_fours();
        let tiled = block_rows.is_multiple_of(rows) || blocks.along(0) == 1;
        let apart = by_columns || blocks.matrix[1].is_multiple_of(4);
        if !(by_fours && tiled && apart) {
            return None;
        }
        let all = ACROSS * block_rows.div_ceil(rows) * block_columns.div_ceil(4 * ACROSS);
        let units = all.div_ceil(ENOUGH.div_ceil(rows));
        let units = units.next_power_of_two().clamp(ACROSS, cube);
        let pieces = all.div_ceil(units);
        (pieces * rows <= MOST).then_some(Self {
            units,
            teams: cube / units,
            pieces,
            rows,
            narrow,
        })
    }

    fn patches(self, blocks: &Blocks, matrices: usize) -> (PatchesLaunch, usize) {
        let across = match self.narrow {
            true => blocks.matrix[1].div_ceil(4 * ACROSS),
            false => blocks.along(1),
        };
        let strip = ACROSS * blocks.block[0].div_ceil(self.rows);
        let count = matrices * blocks.along(0) * across;
        (PatchesLaunch::new(count, across, strip), count)
    }
}

/// Fills `codes`, which lie by columns if the team transposes them. Returns the scales.
pub(super) fn quantize(
    rows: &Rows,
    cast: Fp8Cast,
    blocks: &Blocks,
    team: Team,
    codes: &CubeTensor,
) -> CubeTensor {
    let input = &rows.tensor;
    let shape = input.shape();
    let scale = cast.granularity.scale_shape(&shape);
    let scale = buffer::empty_floats(input, scale.into(), DType::F32);
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));
    let (patches, count) = team.patches(blocks, blocks.matrices(shape.num_elements()));
    let cubes = buffer::cubes(count.div_ceil(team.teams));
    let vector = rows.vector();
    let (codes, words) = match team.rows {
        1 => (buffer::code_words(codes), 1),
        _ => (buffer::code_pairs(codes), 2),
    };
    held_kernel::launch(
        &client,
        cubes,
        CubeDim::new_1d((team.teams * team.units) as u32),
        vector,
        words,
        input::by(input, vector),
        buffer::whole(&scale),
        codes,
        blocks.launch(),
        patches,
        rows.pitch,
        cast.format.max(),
        team,
        cast.power_of_two,
        Codec::of(&client, cast.format),
        dtype,
    );
    scale
}

/// How matrices are divided into patches, and patches into strips that are `ACROSS` pieces wide.
#[derive(CubeType, CubeLaunch)]
struct Patches {
    count: usize,
    across: FastDivmod<usize>,
    strip: FastDivmod<usize>,
}

/// The position of a patch. Numbers behind the last one give a patch without rows.
#[derive(CubeType, Clone, Copy)]
struct Patch {
    matrix: usize,
    block_row: usize,
    side: usize,
    column: usize,
    end_column: usize,
    row: usize,
    end_row: usize,
}

#[cube]
fn patch(patches: &Patches, grid: &Grid, number: usize, #[comptime] team: Team) -> Patch {
    let (line, side) = patches.across.div_mod(number);
    let (matrix, block_row) = grid.by_down.div_mod(line);
    let width = if comptime!(team.narrow) {
        comptime!(4 * ACROSS).runtime()
    } else {
        grid.block_columns
    };
    let (row, column) = (block_row * grid.block_rows, side * width);
    let end_row = usize::min(row + grid.block_rows, grid.rows);
    Patch {
        matrix,
        block_row,
        side,
        column,
        end_column: usize::min(column + width, grid.columns),
        row,
        end_row: select(number < patches.count, end_row, 0),
    }
}

/// The position of a piece of a patch. Numbers behind its last one give a piece beyond its columns.
#[cube]
fn piece(patches: &Patches, patch: &Patch, number: usize, #[comptime] team: Team) -> Tile {
    let (strip, place) = patches.strip.div_mod(number);
    Tile {
        matrix: patch.matrix,
        row: patch.row + place / ACROSS * team.rows,
        column: patch.column + (strip * ACROSS + place % ACROSS) * 4,
    }
}

#[cube]
fn is_inside(patch: &Patch, row: usize, column: usize) -> bool {
    row < patch.end_row && column < patch.end_column
}

/// A team casts one patch at a time. All teams of a cube go through the steps together.
#[cube(launch)]
fn held_kernel<F: Numeric, N: Size, W: Size>(
    input: &[Vector<F, N>],
    scales: &mut [f32],
    codes: &mut [Vector<u32, W>],
    grid: Grid,
    patches: Patches,
    pitch: usize,
    fp8_max: f32,
    #[comptime] team: Team,
    #[comptime] power_of_two: bool,
    #[comptime] codec: Codec,
    #[define(F)] _dtype: ElemType,
) {
    let (rows, columns) = (grid.rows, grid.columns);
    let unit = UNIT_POS as usize;
    let member = unit % team.units;
    let mut amaxes =
        Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(team.teams * team.units));
    let mut first = CUBE_POS * team.teams;
    while first < patches.count {
        let patch = patch(&patches, &grid, first + unit / team.units, team);

        let mut values = Array::<Four>::new(comptime!(team.pieces * team.rows));
        #[unroll]
        for i in 0..team.pieces {
            let piece = piece(&patches, &patch, member + i * team.units, team);
            #[unroll]
            for j in 0..team.rows {
                let row = piece.row + j;
                let line = patch.matrix * rows + row;
                let inside = is_inside(&patch, row, piece.column);
                let end = select(inside, line * pitch + patch.end_column, 0);
                values[i * team.rows + j] = input::four(input, line * pitch + piece.column, end);
            }
        }

        let mut largest = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..comptime!(team.pieces * team.rows) {
            largest = max(largest, magnitudes(values[i]));
        }
        let amax = amax_of_team(&mut amaxes, largest, team);

        let mut factors = Four::new(scale_of(amax.extract(0usize), fp8_max, power_of_two));
        if comptime!(team.narrow) {
            #[unroll]
            for lane in 1..4usize {
                factors.insert(lane, scale_of(amax.extract(lane), fp8_max, power_of_two));
            }
        }
        let line = patch.matrix * grid.down + patch.block_row;
        if comptime!(team.narrow) {
            if member < ACROSS {
                #[unroll]
                for lane in 0..4usize {
                    let column = patch.column + 4 * member + lane;
                    if is_inside(&patch, patch.row, column) {
                        scales[line * grid.across + column] = factors.extract(lane);
                    }
                }
            }
        } else if member == 0 && patch.row < patch.end_row {
            scales[line * grid.across + patch.side] = factors.extract(0usize);
        }

        #[unroll]
        for i in 0..team.pieces {
            let piece = piece(&patches, &patch, member + i * team.units, team);
            if is_inside(&patch, piece.row, piece.column) {
                if comptime!(team.rows == 1) {
                    let first = (patch.matrix * rows + piece.row) * columns + piece.column;
                    codes[first / 4] = Vector::new(encode(values[i] * factors, codec));
                } else {
                    let mut words = Array::<u32>::new(tiles::ROWS);
                    #[unroll]
                    for j in 0..tiles::ROWS {
                        words[j] = encode(values[i * tiles::ROWS + j] * factors, codec);
                    }
                    tiles::store_columns(codes, &words, &piece, rows, columns);
                }
            }
        }
        first += CUBE_COUNT * team.teams;
    }
}

/// The bits of the amax of a team's patch. With narrow blocks, those of the four columns that the unit's pieces have.
#[cube]
fn amax_of_team(
    amaxes: &mut Shared<[Vector<u32, Const<4>>]>,
    own: Vector<u32, Const<4>>,
    #[comptime] team: Team,
) -> Vector<u32, Const<4>> {
    let unit = UNIT_POS as usize;
    let member = unit % team.units;
    // Units with the same columns are `ACROSS` apart.
    let columns = if comptime!(team.narrow) { ACROSS } else { 1 };
    // Other units may still be reading the previous result.
    sync_cube();
    amaxes[unit] = own;
    #[unroll]
    for halving in 0..comptime!((team.units / columns).ilog2()) {
        let half = comptime!(team.units >> (halving + 1));
        sync_cube();
        if member < half {
            amaxes[unit] = max(amaxes[unit], amaxes[unit + half]);
        }
    }
    sync_cube();
    let found = amaxes[unit - member + member % columns];
    if comptime!(team.narrow) {
        found
    } else {
        Vector::new(largest_lane(found))
    }
}
