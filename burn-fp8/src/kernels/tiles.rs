//! Tiles of matrices whose codes are transposed. A unit takes 8 rows by 4 columns, and 32 neighboring units take 32 by 32.
//! Together they read 32 elements of each row, and write 32 codes of each row and of each column: whole sectors of a GPU's
//! memory.

use burn::tensor::Shape;
use cubecl::{prelude::*, std::FastDivmod};

use super::{buffer, codec::Four, input};

/// Rows of a unit's tile.
pub(in crate::kernels) const ROWS: usize = 8;

/// The numbers of units side by side, and one below the other.
const ACROSS: usize = 8;
const DOWN: usize = 4;

/// Rows and columns that neighboring units take together.
const BLOCK: usize = 32;

/// How matrices are divided into tiles.
#[derive(CubeType, CubeLaunch)]
pub(in crate::kernels) struct Tiles {
    tiles: usize,
    down: FastDivmod<usize>,
    across: FastDivmod<usize>,
}

/// The first row and column of a tile, which can lie beyond the edges of its matrix.
#[derive(CubeType, Clone, Copy)]
pub(in crate::kernels) struct Tile {
    pub(in crate::kernels) matrix: usize,
    pub(in crate::kernels) row: usize,
    pub(in crate::kernels) column: usize,
}

/// How `matrices` are divided into tiles, and the number of tiles.
pub(in crate::kernels) fn tiles(
    matrices: usize,
    [rows, columns]: [usize; 2],
) -> (TilesLaunch, usize) {
    let (down, across) = (rows.div_ceil(BLOCK), columns.div_ceil(BLOCK));
    let tiles = matrices * down * across * ACROSS * DOWN;
    (TilesLaunch::new(tiles, down, across), tiles)
}

/// Whether a kernel can count the tiles of a tensor's matrices. Those of very many small matrices, which are mostly empty, it
/// cannot.
pub(in crate::kernels) fn can_be_counted(shape: &Shape) -> bool {
    let blocks = |(back, size): (usize, &usize)| match back {
        0 | 1 => size.div_ceil(BLOCK),
        _ => *size,
    };
    let blocks: usize = shape.iter().rev().enumerate().map(blocks).product();
    blocks * ACROSS * DOWN <= 4 * buffer::MOST
}

/// The number of tiles.
#[cube]
pub(in crate::kernels) fn count(tiles: &Tiles) -> usize {
    tiles.tiles
}

#[cube]
pub(in crate::kernels) fn tile(tiles: &Tiles, number: usize) -> Tile {
    let (block, place) = (number / (ACROSS * DOWN), number % (ACROSS * DOWN));
    let (line, across) = tiles.across.div_mod(block);
    let (matrix, down) = tiles.down.div_mod(line);
    Tile {
        matrix,
        row: (down * DOWN + place / ACROSS) * ROWS,
        column: (across * ACROSS + place % ACROSS) * 4,
    }
}

/// The elements of a tile, row by row, of matrices of `rows` and `columns`, with `pitch` elements from a row to the next; 0 beyond their
/// edges. All loads are issued before the first result is needed.
#[cube]
pub(in crate::kernels) fn load<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    tile: &Tile,
    rows: usize,
    columns: usize,
    pitch: usize,
) -> Array<Four> {
    let line = tile.matrix * rows + tile.row;
    let mut values = Array::<Four>::new(ROWS);
    #[unroll]
    for i in 0..ROWS {
        let start = (line + i) * pitch;
        let end = select(tile.row + i < rows, start + columns, 0);
        values[i] = input::four(input, start + tile.column, end);
    }
    values
}

/// Stores the words of a tile's rows transposed. Columns begin at multiples of 16 bytes.
#[cube]
pub(in crate::kernels) fn store_columns<W: Size>(
    columns_of: &mut [Vector<u32, W>],
    words: &Array<u32>,
    tile: &Tile,
    rows: usize,
    columns: usize,
) {
    let pairs_of_column = rows.div_ceil(16) * 2;
    let turned = pairs::<W>(words);
    #[unroll]
    for j in 0..4usize {
        let column = tile.column + j;
        if column < columns && tile.row < rows {
            let first = (tile.matrix * columns + column) * pairs_of_column;
            columns_of[first + tile.row / ROWS] = turned[j];
        }
    }
}

/// The words of a tile's rows transposed: two words, as one `W`, for each column of the tile.
#[cube]
pub(in crate::kernels) fn pairs<W: Size>(words: &Array<u32>) -> Array<Vector<u32, W>> {
    let upper = turn(words[0], words[1], words[2], words[3]);
    let lower = turn(words[4], words[5], words[6], words[7]);
    let mut pairs = Array::<Vector<u32, W>>::new(4usize);
    #[unroll]
    for j in 0..4usize {
        let mut pair = Vector::<u32, W>::new(upper.extract(j));
        pair.insert(1usize, lower.extract(j));
        pairs[j] = pair;
    }
    pairs
}

/// Transposes 4 by 4 codes: from the words of four rows to the words of their four columns.
#[cube]
fn turn(a: u32, b: u32, c: u32, d: u32) -> Vector<u32, Const<4>> {
    let (even, odd) = (0x00FF_00FFu32, 0xFF00_FF00u32);
    let first_even = (a & even) | ((b & even) << 8u32);
    let first_odd = ((a >> 8u32) & even) | (b & odd);
    let second_even = (c & even) | ((d & even) << 8u32);
    let second_odd = ((c >> 8u32) & even) | (d & odd);
    let mut columns =
        Vector::<u32, Const<4>>::new((first_even & 0xFFFFu32) | (second_even << 16u32));
    columns.insert(1usize, (first_odd & 0xFFFFu32) | (second_odd << 16u32));
    columns.insert(
        2usize,
        (first_even >> 16u32) | (second_even & 0xFFFF_0000u32),
    );
    columns.insert(3usize, (first_odd >> 16u32) | (second_odd & 0xFFFF_0000u32));
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each has 32 tiles.
    #[test]
    fn tiles_of_small_matrices_are_counted_up_to_32_bits() {
        let most = 4 * buffer::MOST / (ACROSS * DOWN);
        assert!(can_be_counted(&Shape::new([most, 1, 1])));
        assert!(can_be_counted(&Shape::new([most, 32, 32])));
        assert!(!can_be_counted(&Shape::new([most + 1, 1, 1])));
        assert!(!can_be_counted(&Shape::new([most / 2 + 1, 33, 1])));
    }
}
