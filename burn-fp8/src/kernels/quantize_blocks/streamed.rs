//! Casts for blocks of any size: one kernel finds the amaxes, another computes the scales, and a third reads the floats again.

use burn::backend::TensorMetadata;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{prelude::*, std::FastDivmod};

use super::super::{
    amax::raise,
    blocks::{Blocks, Grid, block, four_scales},
    buffer,
    codec::{Codec, Four, encode, largest_of},
    input,
    scale::scales,
    tiles::{self, Tiles},
};
use crate::Fp8Cast;

/// The maximum number of elements in which a unit looks for an amax. It is small, so that the elements of neighboring units are
/// near.
const PIECE: usize = 16;

/// Fills `codes` in the layout that they have. Returns the scales.
pub(super) fn quantize(
    input: &CubeTensor,
    cast: Fp8Cast,
    blocks: &Blocks,
    by_columns: bool,
    codes: &CubeTensor,
) -> CubeTensor {
    let Fp8Cast {
        format,
        granularity,
        power_of_two,
    } = cast;
    let shape = input.shape();
    let (columns, length) = (blocks.matrix[1], shape.num_elements());
    let amax = buffer::zeros(input, granularity.scale_shape(&shape).into());
    let vector = input::vector(input, columns);
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));

    // A load with elements of two blocks would mix their amaxes.
    let own = match blocks.by_fours() {
        true => vector,
        false => 1,
    };
    let (pieces, count) = pieces(blocks, blocks.matrices(length));
    let (count, dim) = buffer::grid(&client, count);
    amax_kernel::launch(
        &client,
        count,
        dim,
        own,
        input::by(input, own),
        buffer::as_it_lies(&amax),
        blocks.launch(),
        pieces,
        dtype,
    );
    let scale = scales(amax, format, power_of_two);
    let codec = Codec::of(&client, format);
    if by_columns {
        let (tiles, count) = tiles::tiles(blocks.matrices(length), blocks.matrix);
        let (count, dim) = buffer::grid(&client, count);
        columns_kernel::launch(
            &client,
            count,
            dim,
            vector,
            input::by(input, vector),
            buffer::as_it_lies(&scale),
            buffer::code_pairs(codes),
            blocks.launch(),
            tiles,
            blocks.by_fours(),
            codec,
            dtype,
        );
    } else {
        let (count, dim) = buffer::grid(&client, buffer::words(length));
        quantize_kernel::launch(
            &client,
            count,
            dim,
            vector,
            input::by(input, vector),
            buffer::as_it_lies(&scale),
            buffer::code_words(codes),
            blocks.launch(),
            columns / vector,
            blocks.by_fours(),
            codec,
            dtype,
        );
    }
    scale
}

/// How blocks are divided into pieces, of which a unit takes one at a time. A piece is a short part of a row, or of several rows,
/// so that neighboring units read neighboring elements.
#[derive(CubeType, CubeLaunch)]
struct Pieces {
    pieces: usize,
    rows: usize,
    columns: usize,
    /// The number of pieces in all blocks side by side.
    line: FastDivmod<usize>,
    across: FastDivmod<usize>,
    down: FastDivmod<usize>,
}

/// How matrices are divided into pieces, and the number of pieces.
fn pieces(blocks: &Blocks, matrices: usize) -> (PiecesLaunch, usize) {
    let [rows, columns] = blocks.block;
    let piece_rows = rows.min(PIECE / columns.min(4));
    let piece_columns = match PIECE / piece_rows {
        most if most >= columns => columns,
        most => most / 4 * 4,
    };
    let (down, across) = (rows.div_ceil(piece_rows), columns.div_ceil(piece_columns));
    let line = across * blocks.along(1);
    let pieces = matrices * blocks.along(0) * down * line;
    let launch = PiecesLaunch::new(pieces, piece_rows, piece_columns, line, across, down);
    (launch, pieces)
}

/// The amax of every block. Each unit finds that of one piece at a time.
#[cube(launch)]
fn amax_kernel<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    amax: &[Atomic<u32>],
    grid: Grid,
    pieces: Pieces,
    #[define(F)] _dtype: ElemType,
) {
    let (rows, columns) = (grid.rows, grid.columns);
    let mut number = ABSOLUTE_POS;
    while number < pieces.pieces {
        // Pieces are ordered by their rows, across all blocks side by side.
        let (line, place) = pieces.line.div_mod(number);
        let (block_column, piece_column) = pieces.across.div_mod(place);
        let (block_line, piece_row) = pieces.down.div_mod(line);
        let (matrix, block_row) = grid.by_down.div_mod(block_line);
        let first_column = block_column * grid.block_columns + piece_column * pieces.columns;
        let first_row = block_row * grid.block_rows + piece_row * pieces.rows;
        let block_end = usize::min((block_column + 1) * grid.block_columns, columns);
        let end_column = usize::min(first_column + pieces.columns, block_end);
        let block_end = usize::min((block_row + 1) * grid.block_rows, rows);
        let end_row = usize::min(first_row + pieces.rows, block_end);
        let mut max = 0u32;
        for row in first_row..end_row {
            let start = (matrix * rows + row) * columns;
            let mut column = first_column;
            while column < end_column {
                max = largest_of(input::four(input, start + column, start + end_column), max);
                column += 4;
            }
        }
        raise(amax, block_line * grid.across + block_column, max);
        number += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Each unit encodes one word of four codes at a time.
#[cube(launch)]
fn quantize_kernel<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    scales: &[f32],
    codes: &mut [u32],
    grid: Grid,
    loads: FastDivmod<usize>,
    #[comptime] by_fours: bool,
    #[comptime] codec: Codec,
    #[define(F)] _dtype: ElemType,
) {
    let size = N::value();
    let length = input.len() * size;
    let mut word = ABSOLUTE_POS;
    while word < codes.len() {
        let values = input::four(input, 4 * word, length);
        if comptime!(size == 4) {
            let (line, load) = loads.div_mod(word);
            let (matrix, row) = grid.by_rows.div_mod(line);
            let factors = four_scales(scales, &grid, matrix, row, 4 * load, by_fours);
            codes[word] = encode(values * factors, codec);
        } else {
            // A word may have codes of two rows.
            let mut factors = Four::new(0.0f32);
            #[unroll]
            for lane in 0..4usize {
                // There may be more elements than `FastDivmod` can divide, which is 2^31.
                let index = usize::min(4 * word + lane, length - 1);
                let (line, column) = (index / grid.columns, index % grid.columns);
                let (matrix, row) = grid.by_rows.div_mod(line);
                factors.insert(lane, scales[block(&grid, matrix, row, column)]);
            }
            codes[word] = encode(values * factors, codec);
        }
        word += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The codes by columns. Each unit encodes one tile at a time, two words of each column.
#[cube(launch)]
fn columns_kernel<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    scales: &[f32],
    codes: &mut [Vector<u32, Const<2>>],
    grid: Grid,
    tiles: Tiles,
    #[comptime] by_fours: bool,
    #[comptime] codec: Codec,
    #[define(F)] _dtype: ElemType,
) {
    let (rows, columns) = (grid.rows, grid.columns);
    let mut number = ABSOLUTE_POS;
    while number < tiles::count(&tiles) {
        let tile = tiles::tile(&tiles, number);
        let values = tiles::load(input, &tile, rows, columns, columns);
        let mut words = Array::<u32>::new(tiles::ROWS);
        #[unroll]
        for i in 0..tiles::ROWS {
            let row = tile.row + i;
            let factors = four_scales(scales, &grid, tile.matrix, row, tile.column, by_fours);
            words[i] = encode(values[i] * factors, codec);
        }
        tiles::store_columns(codes, &words, &tile, rows, columns);
        number += CUBE_COUNT * CUBE_DIM as usize;
    }
}
