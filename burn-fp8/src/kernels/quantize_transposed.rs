use burn::backend::TensorMetadata;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    amax::{raise_together, together},
    buffer,
    codec::{Codec, encode, largest_of},
    input,
    rows::{Rows, pitch_of},
    tiles::{self, Tiles},
};
use crate::Fp8Format;

/// The codes, a separate copy of their transpose, and the amax. Rows of both begin at multiples of 16 bytes. This is
/// [`Fp8Ops::fp8_quantize_transposed`](crate::Fp8Ops::fp8_quantize_transposed) on devices whose products read along the inner
/// dimension.
pub(crate) fn quantize_transposed(
    input: CubeTensor,
    scale: CubeTensor,
    format: Fp8Format,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let shape = input.shape();
    let rank = shape.num_dims();
    let [rows, columns] = [shape[rank - 2], shape[rank - 1]];
    let turned = buffer::swapped(input.clone());
    if pitch_of(&input).is_none() && pitch_of(&turned).is_some() {
        let (codes, transposed, amax) = quantize_transposed(turned, scale, format);
        return (transposed, codes, amax);
    }
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
    let lines = Rows::of(input);
    let input = &lines.tensor;
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));
    let (tiles, count) = tiles::tiles(length / (rows * columns), [rows, columns]);
    let (count, dim) = buffer::grid(&client, count);
    let vector = lines.vector();
    quantize_kernel::launch(
        &client,
        count,
        dim,
        vector,
        input::by(input, vector),
        buffer::scalar(scale),
        buffer::code_words(&codes),
        buffer::code_pairs(&transposed),
        buffer::raw(amax.handle.clone(), 1),
        tiles,
        rows,
        columns,
        lines.pitch,
        Codec::of(&client, format),
        together(&client, dim),
        dtype,
    );
    (codes, transposed, amax)
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

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::backend::ops::{FloatTensorOps, IntTensorOps};
    use burn::tensor::TensorData;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use burn_std::reader::try_read_sync;

    use super::*;
    use crate::kernels::{buffer::swapped, quantize};

    /// Sizes on both sides of a word, a tile and a block of tiles, and batches. The reference is the cast without a transpose.
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
                // The transpose of the input, which is a view, gives the same with codes and transpose exchanged.
                let view = swapped(input());
                let (turned, same, _) = quantize_transposed(view, scale(), format);
                assert_eq!(same.shape(), [batches, rows, columns].into());
                if count > 0 {
                    let [there, back] = [expected.clone(), swapped(expected)].map(codes);
                    assert_eq!([codes(both), codes(same)], [there.clone(), there]);
                    assert_eq!([codes(transposed), codes(turned)], [back.clone(), back]);
                }
            }
        }
    }
}
