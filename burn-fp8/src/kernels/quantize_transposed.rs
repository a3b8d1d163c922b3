use burn::backend::TensorMetadata;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{CubeKernel, client::Client, ir::types::Fp8Format as CubeFormat, prelude::*};

use super::{
    amax::raise,
    buffer,
    codec::{cube_format, encode, magnitude_bits},
    definitions::define,
};
use crate::Fp8Format;

/// Tiles side by side, and one below the other, that neighbouring units make: together they fill 32 bytes of a row of the
/// codes, and 16 of a row of the transposed ones.
const ACROSS: u32 = 8;
const DOWN: u32 = 4;

/// See [`Fp8Ops::fp8_quantize_transposed`](crate::Fp8Ops::fp8_quantize_transposed).
pub(crate) fn quantize_transposed(
    input: CubeTensor,
    scale: CubeTensor,
    format: Fp8Format,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let shape = input.shape();
    let rank = shape.num_dims();
    let [rows, columns] = [shape[rank - 2], shape[rank - 1]];
    let mut swapped = shape.clone();
    swapped[rank - 2] = columns;
    swapped[rank - 1] = rows;

    let amax = buffer::zero_scalar(&input);
    let length = shape.num_elements();
    let codes = buffer::empty_code_rows(&input, shape);
    let transposed = buffer::empty_code_rows(&input, swapped);
    if length == 0 {
        return (codes, transposed, amax);
    }
    let batches = length / (rows * columns);
    let blocks = batches
        * buffer::words(rows).div_ceil(DOWN as usize)
        * buffer::words(columns).div_ceil(ACROSS as usize);
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));
    let (count, dim) = buffer::grid(&client, blocks * (ACROSS * DOWN) as usize);
    quantize_kernel::launch(
        &client,
        count,
        dim,
        buffer::elements(input),
        buffer::elements(scale),
        buffer::code_words(&codes),
        buffer::code_words(&transposed),
        buffer::raw(amax.handle.clone(), 1),
        batches as u32,
        rows as u32,
        columns as u32,
        cube_format(format),
        dtype,
    );
    (codes, transposed, amax)
}

pub(super) fn definition(client: &Client, format: Fp8Format, dtype: ElemType) -> KernelDefinition {
    let word = || buffer::word(client);
    let format = cube_format(format);
    define!(
        client,
        quantize_kernel(
            word(),
            word(),
            word(),
            word(),
            word(),
            1,
            1,
            1,
            format,
            dtype
        )
    )
}

/// A unit makes a tile of 4 by 4 codes: a word of each of its rows, and a word of each of its columns.
#[cube(launch, create_dummy_kernel)]
fn quantize_kernel<F: Numeric>(
    input: &[F],
    scale: &[f32],
    codes: &mut [u32],
    transposed: &mut [u32],
    amax: &[Atomic<u32>],
    batches: u32,
    rows: u32,
    columns: u32,
    #[comptime] format: CubeFormat,
    #[define(F)] _dtype: ElemType,
) {
    let scale = scale[0];
    let row_words = (columns.div_ceil(16u32) * 4u32) as usize;
    let column_words = (rows.div_ceil(16u32) * 4u32) as usize;
    let blocks_across = columns.div_ceil(4u32 * ACROSS) as usize;
    let blocks_down = rows.div_ceil(4u32 * DOWN) as usize;
    let (rows, columns) = (rows as usize, columns as usize);
    let tiles =
        batches as usize * blocks_down * blocks_across * comptime!((ACROSS * DOWN) as usize);

    let mut max = 0u32;
    let mut tile = ABSOLUTE_POS;
    while tile < tiles {
        let block = tile / comptime!((ACROSS * DOWN) as usize);
        let place = tile % comptime!((ACROSS * DOWN) as usize);
        let batch = block / (blocks_down * blocks_across);
        let row = (block / blocks_across % blocks_down * comptime!(DOWN as usize)
            + place / comptime!(ACROSS as usize))
            * 4;
        let column = (block % blocks_across * comptime!(ACROSS as usize)
            + place % comptime!(ACROSS as usize))
            * 4;

        let mut row_codes = Array::<u32>::new(4usize);
        let mut column_codes = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            row_codes[i] = 0u32;
            column_codes[i] = 0u32;
        }
        #[unroll]
        for i in 0..4usize {
            #[unroll]
            for j in 0..4usize {
                if row + i < rows && column + j < columns {
                    let index = (batch * rows + row + i) * columns + column + j;
                    let value = f32::cast_from(input[index]);
                    max = u32::max(max, magnitude_bits(value));
                    let code = encode(value * scale, format);
                    row_codes[i] |= code << comptime!(8 * j as u32);
                    column_codes[j] |= code << comptime!(8 * i as u32);
                }
            }
        }
        #[unroll]
        for i in 0..4usize {
            if row + i < rows && column < columns {
                codes[(batch * rows + row + i) * row_words + column / 4] = row_codes[i];
            }
            if column + i < columns && row < rows {
                transposed[(batch * columns + column + i) * column_words + row / 4] =
                    column_codes[i];
            }
        }
        tile += CUBE_COUNT * CUBE_DIM as usize;
    }
    raise(amax, 0usize, max);
}
