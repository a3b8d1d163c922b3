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

/// The codes, those of the transpose as a copy of its own, both in rows that begin at multiples of 16 bytes, and the amax:
/// [`Fp8Ops::fp8_quantize_transposed`](crate::Fp8Ops::fp8_quantize_transposed) where products read along their sums.
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
        buffer::scalar(scale),
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

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::backend::ops::{FloatTensorOps, IntTensorOps};
    use burn::tensor::TensorData;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use burn_std::reader::try_read_sync;

    use super::*;
    use crate::kernels::{buffer::swapped, quantize};

    /// Sizes on both sides of a word, a tile and a block of tiles; batches. The peer is the cast in one layout.
    #[test]
    fn the_copy_is_the_transpose() {
        let device = CubeDevice::Cpu(Default::default());
        let float = |data| CubeBackend::float_from_data(data, &device);
        let codes = |tensor| {
            let data = try_read_sync(CubeBackend::int_into_data(tensor));
            data.unwrap().unwrap().try_to_vec::<u8>().unwrap()
        };
        let amax = |tensor| {
            let data = try_read_sync(CubeBackend::float_into_data(tensor));
            data.unwrap().unwrap().try_to_vec::<f32>().unwrap()
        };
        for shape in [
            [1, 1, 1],
            [1, 4, 4],
            [1, 3, 7],
            [2, 17, 34],
            [3, 6, 1],
            [1, 20, 65],
            [2, 0, 3],
        ] {
            for format in Fp8Format::ALL {
                let count = shape.iter().product();
                let number = |index| (index as f32 * 0.7).sin() * 20.0;
                let values: Vec<f32> = (0..count).map(number).collect();
                let input = || float(TensorData::new(values.clone(), shape));
                let scale = || float(TensorData::from([30f32]));
                let (both, transposed, both_amax) = quantize_transposed(input(), scale(), format);
                let (expected, expected_amax) = quantize(input(), scale(), format);
                assert_eq!(amax(both_amax), amax(expected_amax));
                let [batches, rows, columns] = shape;
                assert_eq!(transposed.shape(), [batches, columns, rows].into());
                if count > 0 {
                    assert_eq!(codes(both), codes(expected.clone()));
                    assert_eq!(codes(transposed), codes(swapped(expected)));
                }
            }
        }
    }
}
