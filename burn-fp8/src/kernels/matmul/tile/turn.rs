//! The copy of an operand whose rows lie next to each other, as those of a weight do: read and written by whole words.

use cubecl::{CubeKernel, client::Client, prelude::*, server::Handle};

use crate::kernels::{buffer, definitions::define};

/// Tiles side by side, and one below the other, that neighbouring units make: together they read 32 bytes, and fill 16 of a
/// row of the copy.
const ACROSS: u32 = 8;
const DOWN: u32 = 4;

/// Whether matrices at `starts` can be read by words, where the codes of neighbouring rows are neighbours.
pub(super) fn is_by_words(starts: &[usize], row_stride: usize, inner_stride: usize) -> bool {
    let words = |codes: usize| codes.is_multiple_of(4);
    row_stride == 1 && words(inner_stride) && starts.iter().all(|&start| words(start))
}

/// Fills a copy of `words` words: matrices of `rows` of `length` codes, each filled up to whole chunks with zeros.
pub(super) fn launch(
    client: &Client,
    codes: BufferArg,
    starts: Handle,
    copy: Handle,
    matrices: usize,
    [rows, length]: [usize; 2],
    inner_stride: usize,
) {
    let row_words = 4 * length.div_ceil(16);
    let tiles = matrices * rows.next_multiple_of(4 * ACROSS as usize) / 4 * row_words;
    let (count, dim) = buffer::grid(client, tiles);
    turn_rows_kernel::launch(
        client,
        count,
        dim,
        codes,
        buffer::raw(starts, matrices),
        buffer::raw(copy, matrices * rows * row_words),
        rows as u32,
        length as u32,
        inner_stride as u32,
    );
}

pub(super) fn definition(client: &Client) -> KernelDefinition {
    let word = || buffer::word(client);
    define!(client, turn_rows_kernel(word(), word(), word(), 1, 1, 4))
}

/// A unit makes one word of each of four rows, of four words that it reads.
#[cube(launch, create_dummy_kernel)]
fn turn_rows_kernel(
    codes: &[u32],
    starts: &[u32],
    copy: &mut [u32],
    rows: u32,
    length: u32,
    inner_stride: u32,
) {
    let row_words = length.div_ceil(16u32) * 4u32;
    let blocks_across = rows.div_ceil(4u32 * ACROSS) as usize;
    let blocks_down = (row_words / DOWN) as usize;
    let tiles = starts.len() * blocks_across * blocks_down * comptime!((ACROSS * DOWN) as usize);
    let mut tile = ABSOLUTE_POS;
    while tile < tiles {
        let block = tile / comptime!((ACROSS * DOWN) as usize);
        let place = (tile % comptime!((ACROSS * DOWN) as usize)) as u32;
        let matrix = block / (blocks_across * blocks_down);
        let row = ((block % blocks_across) as u32 * ACROSS + place % ACROSS) * 4u32;
        let word = (block / blocks_across % blocks_down) as u32 * DOWN + place / ACROSS;
        let mut packed = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            packed[i] = 0u32;
        }
        #[unroll]
        for j in 0..4u32 {
            let inner = word * 4u32 + j;
            if inner < length && row < rows {
                let index = starts[matrix] + inner * inner_stride + row;
                let read = codes[(index / 4u32) as usize];
                #[unroll]
                for i in 0..4usize {
                    let code = (read >> comptime!(8 * i as u32)) & 0xFFu32;
                    packed[i] |= code << comptime!(8 * j);
                }
            }
        }
        #[unroll]
        for i in 0..4usize {
            let row = row + comptime!(i as u32);
            if row < rows {
                let line = matrix * rows as usize + row as usize;
                copy[line * row_words as usize + word as usize] = packed[i];
            }
        }
        tile += CUBE_COUNT * CUBE_DIM as usize;
    }
}
