//! Copying an operand whose rows are adjacent in memory, such as a weight, by whole words.

use cubecl::{client::Client, prelude::*, server::Handle};

use crate::kernels::{
    buffer,
    tiles::{self, Tiles},
};

/// Whether matrices at `starts` can be read by words: the codes of neighboring rows are adjacent, and aligned.
pub(super) fn is_by_words(starts: &[usize], row_stride: usize, inner_stride: usize) -> bool {
    let words = |codes: usize| codes.is_multiple_of(4);
    row_stride == 1 && words(inner_stride) && starts.iter().all(|&start| words(start))
}

/// Fills a copy with matrices of `rows` of `length` codes, each padded to whole chunks with zeros.
pub(super) fn launch(
    client: &Client,
    codes: BufferArg,
    starts: BufferArg,
    copy: Handle,
    matrices: usize,
    [rows, length]: [usize; 2],
    inner_stride: usize,
) {
    let padded = length.next_multiple_of(16);
    let (tiles, count) = tiles::tiles(matrices, [padded, rows]);
    let (count, dim) = buffer::grid(client, count);
    turn_rows_kernel::launch(
        client,
        count,
        dim,
        codes,
        starts,
        buffer::array(copy, matrices * rows * padded / 8, 8),
        tiles,
        rows,
        length,
        padded,
        inner_stride,
    );
}

/// Each unit reads eight words and writes two words of each of four rows.
#[cube(launch)]
fn turn_rows_kernel(
    codes: &[u32],
    starts: &[u32],
    copy: &mut [Vector<u32, Const<2>>],
    tiles: Tiles,
    rows: usize,
    length: usize,
    padded: usize,
    inner_stride: usize,
) {
    let mut number = ABSOLUTE_POS;
    while number < tiles::count(&tiles) {
        let tile = tiles::tile(&tiles, number);
        let start = starts[tile.matrix] as usize;
        let mut words = Array::<u32>::new(tiles::ROWS);
        #[unroll]
        for i in 0..tiles::ROWS {
            let inner = tile.row + i;
            words[i] = 0u32;
            if inner < length && tile.column < rows {
                words[i] = codes[(start + inner * inner_stride + tile.column) / 4];
            }
        }
        tiles::store_columns(copy, &words, &tile, padded, rows);
        number += CUBE_COUNT * CUBE_DIM as usize;
    }
}
