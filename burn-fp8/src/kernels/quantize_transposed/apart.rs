//! Casts in which each unit stores what it encodes.

use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    super::{
        amax::{raise_together, together},
        buffer,
        codec::{Codec, encode, largest_of},
        input,
        tiles::{self, Tiles},
    },
    Cast,
};

/// Fills `codes` and `transposed`, and raises `amax`.
pub(super) fn quantize(cast: Cast, codes: &CubeTensor, transposed: &CubeTensor, amax: &CubeTensor) {
    let [rows, columns] = cast.matrix;
    let input = &cast.rows.tensor;
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));
    let (tiles, count) = tiles::tiles(cast.matrices, cast.matrix);
    let (count, dim) = buffer::grid(&client, count);
    let vector = cast.rows.vector();
    quantize_kernel::launch(
        &client,
        count,
        dim,
        vector,
        input::by(input, vector),
        buffer::scalar(cast.scale),
        buffer::code_words(codes),
        buffer::code_pairs(transposed),
        buffer::raw(amax.handle.clone(), 1),
        tiles,
        rows,
        columns,
        cast.rows.pitch,
        Codec::of(&client, cast.format),
        together(&client, dim),
        dtype,
    );
}

/// Each unit encodes a tile: one word for each of its rows, and two for each of its columns.
#[cube(launch)]
fn quantize_kernel<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    scale: &[f32],
    codes: &mut [u32],
    transposed: &mut [Vector<u32, Const<2>>],
    amax: &[Atomic<u32>],
    tiles: Tiles,
    rows: usize,
    columns: usize,
    pitch: usize,
    #[comptime] codec: Codec,
    #[comptime] together: usize,
    #[define(F)] _dtype: ElemType,
) {
    let scale = Vector::new(scale[0]);
    let row_words = columns.div_ceil(16) * 4;
    let mut max = 0u32;
    let mut number = ABSOLUTE_POS;
    while number < tiles::count(&tiles) {
        let tile = tiles::tile(&tiles, number);
        let line = tile.matrix * rows + tile.row;
        let values = tiles::load(input, &tile, rows, columns, pitch);
        let mut words = Array::<u32>::new(tiles::ROWS);
        #[unroll]
        for i in 0..tiles::ROWS {
            max = largest_of(values[i], max);
            words[i] = encode(values[i] * scale, codec);
            if tile.row + i < rows && tile.column < columns {
                codes[(line + i) * row_words + tile.column / 4] = words[i];
            }
        }
        tiles::store_columns(transposed, &words, &tile, rows, columns);
        number += CUBE_COUNT * CUBE_DIM as usize;
    }
    raise_together(amax, max, together);
}
