use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{kernel::into_contiguous, ops::numeric::zeros_client, tensor::CubeTensor};
use cubecl::{CubeKernel, client::Client, ir::types::Fp8Format as CubeFormat, prelude::*};

use super::{
    amax::raise,
    buffer,
    codec::{cube_format, encode, magnitude_bits},
    definitions::define,
    scale::scales,
};
use crate::{Fp8Cast, Fp8Format, Granularity, custom::scale_shape};

/// Elements, at most, that a unit looks for an amax in.
const PIECE: usize = 32;

/// Tiles side by side, and one below the other, that neighbouring units make of codes that lie by columns: together they
/// read 32 elements of a row, and fill 16 bytes of a column.
const ACROSS: u32 = 8;
const DOWN: u32 = 4;

/// See [`Fp8Ops::fp8_quantize_blocks`](crate::Fp8Ops::fp8_quantize_blocks). The codes of the matrices of a tensor can lie
/// `by_columns`, each beginning at a multiple of 16 bytes, instead of row by row.
pub(crate) fn quantize_blocks(
    input: CubeTensor,
    cast: Fp8Cast,
    by_columns: bool,
) -> (CubeTensor, CubeTensor) {
    let Fp8Cast {
        format,
        granularity,
        power_of_two,
    } = cast;
    let shape = input.shape();
    let by_columns = by_columns && shape.num_dims() > 1;
    let codes = match by_columns {
        true => buffer::empty_code_columns(&input, &shape),
        false => buffer::empty_codes(&input.client, &input.device, shape.clone()),
    };
    let amax = zeros_client(
        input.client.clone(),
        input.device.clone(),
        scale_shape(&shape, granularity),
        DType::F32,
    );
    if shape.num_elements() == 0 {
        return (codes, scales(amax, format, power_of_two));
    }
    let input = into_contiguous(input);
    let blocks = Blocks::of(&shape, granularity);
    let (client, dtype) = (input.client.clone(), dtype_to_storage_type(input.dtype));
    let (count, dim) = buffer::grid(&client, blocks.pieces(shape.num_elements()));
    amax_kernel::launch(
        &client,
        count,
        dim,
        buffer::as_it_lies(&input),
        buffer::as_it_lies(&amax),
        blocks.launch(),
        dtype,
    );
    let scale = scales(amax, format, power_of_two);
    let (launch, units): (Launch, _) = match by_columns {
        true => (columns_kernel::launch, blocks.tiles(shape.num_elements())),
        false => (quantize_kernel::launch, buffer::words(shape.num_elements())),
    };
    let (count, dim) = buffer::grid(&client, units);
    launch(
        &client,
        count,
        dim,
        buffer::as_it_lies(&input),
        buffer::as_it_lies(&scale),
        buffer::code_words(&codes),
        blocks.launch(),
        cube_format(format),
        dtype,
    );
    (codes, scale)
}

/// How the kernels that make codes are launched.
type Launch = fn(
    &Client,
    CubeCount,
    CubeDim,
    BufferArg,
    BufferArg,
    BufferArg,
    GridLaunch,
    CubeFormat,
    ElemType,
);

pub(super) fn definitions(
    client: &Client,
    format: Fp8Format,
    dtype: ElemType,
) -> [KernelDefinition; 3] {
    let word = || buffer::word(client);
    let grid = || GridLaunch::new(1, 1, 1, 1, 1, 1);
    let format = cube_format(format);
    [
        define!(client, amax_kernel(word(), word(), grid(), dtype)),
        define!(
            client,
            quantize_kernel(word(), word(), word(), grid(), format, dtype)
        ),
        define!(
            client,
            columns_kernel(word(), word(), word(), grid(), format, dtype)
        ),
    ]
}

/// The elements of a matrix that share a scale, and those of them that are one unit's.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Grid {
    rows: u32,
    columns: u32,
    block_rows: u32,
    block_columns: u32,
    piece_rows: u32,
    piece_columns: u32,
}

/// The same on the host.
struct Blocks {
    matrix: [usize; 2],
    /// As far as the matrix goes.
    block: [usize; 2],
    /// A piece of a block: neighbours in a row, so that neighbouring units read them, and as many rows as it takes.
    piece: [usize; 2],
}

impl Blocks {
    /// Of a tensor that has elements. One of a single dimension is a row.
    fn of(shape: &Shape, granularity: Granularity) -> Self {
        let rank = shape.num_dims();
        let rows = if rank > 1 { shape[rank - 2] } else { 1 };
        let columns = shape[rank - 1];
        let block_rows = granularity.rows().map_or(rows, |size| size.min(rows));
        let block_columns = granularity
            .columns()
            .map_or(columns, |size| size.min(columns));
        let piece_rows = block_rows.min(PIECE / block_columns.min(4));
        Self {
            matrix: [rows, columns],
            block: [block_rows, block_columns],
            piece: [piece_rows, block_columns.min(PIECE / piece_rows)],
        }
    }

    /// Pieces of a tensor of `elements`.
    fn pieces(&self, elements: usize) -> usize {
        let along = |dim: usize| {
            self.matrix[dim].div_ceil(self.block[dim]) * self.block[dim].div_ceil(self.piece[dim])
        };
        elements / (self.matrix[0] * self.matrix[1]) * along(0) * along(1)
    }

    /// Tiles of 4 by 4 of a tensor of `elements`, with those that fill up the last ones' neighbours.
    fn tiles(&self, elements: usize) -> usize {
        let [rows, columns] = self.matrix;
        let down = rows.next_multiple_of(4 * DOWN as usize) / 4;
        let across = columns.next_multiple_of(4 * ACROSS as usize) / 4;
        elements / (rows * columns) * down * across
    }

    fn launch(&self) -> GridLaunch {
        GridLaunch::new(
            self.matrix[0] as u32,
            self.matrix[1] as u32,
            self.block[0] as u32,
            self.block[1] as u32,
            self.piece[0] as u32,
            self.piece[1] as u32,
        )
    }
}

/// The amax of every block; a unit finds that of one piece at a time.
#[cube(launch, create_dummy_kernel)]
fn amax_kernel<F: Numeric>(
    input: &[F],
    amax: &[Atomic<u32>],
    grid: Grid,
    #[define(F)] _dtype: ElemType,
) {
    let (rows, columns) = (grid.rows as usize, grid.columns as usize);
    let (block_rows, block_columns) = (grid.block_rows as usize, grid.block_columns as usize);
    let (piece_rows, piece_columns) = (grid.piece_rows as usize, grid.piece_columns as usize);
    let (down, across) = (rows.div_ceil(block_rows), columns.div_ceil(block_columns));
    let pieces_down = block_rows.div_ceil(piece_rows);
    let pieces_across = block_columns.div_ceil(piece_columns);
    let pieces = amax.len() * pieces_down * pieces_across;
    let mut piece = ABSOLUTE_POS;
    while piece < pieces {
        // Pieces in the order of their rows, over all blocks side by side.
        let place = piece % (across * pieces_across);
        let line = piece / (across * pieces_across);
        let block_column = place / pieces_across;
        let block_row = line / pieces_down % down;
        let batch = line / pieces_down / down;
        let first_column = block_column * block_columns + place % pieces_across * piece_columns;
        let first_row = block_row * block_rows + line % pieces_down * piece_rows;
        let block_end = usize::min((block_column + 1) * block_columns, columns);
        let end_column = usize::min(first_column + piece_columns, block_end);
        let block_end = usize::min((block_row + 1) * block_rows, rows);
        let end_row = usize::min(first_row + piece_rows, block_end);
        let mut max = 0u32;
        for row in first_row..end_row {
            for column in first_column..end_column {
                let value = f32::cast_from(input[(batch * rows + row) * columns + column]);
                max = u32::max(max, magnitude_bits(value));
            }
        }
        raise(
            amax,
            (batch * down + block_row) * across + block_column,
            max,
        );
        piece += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// A unit makes one word of four codes at a time.
#[cube(launch, create_dummy_kernel)]
fn quantize_kernel<F: Numeric>(
    input: &[F],
    scales: &[f32],
    codes: &mut [u32],
    grid: Grid,
    #[comptime] format: CubeFormat,
    #[define(F)] _dtype: ElemType,
) {
    let (rows, columns) = (grid.rows as usize, grid.columns as usize);
    let (block_rows, block_columns) = (grid.block_rows as usize, grid.block_columns as usize);
    let (down, across) = (rows.div_ceil(block_rows), columns.div_ceil(block_columns));
    let mut word = ABSOLUTE_POS;
    while word < codes.len() {
        let mut packed = 0u32;
        #[unroll]
        for byte in 0..4usize {
            let index = word * 4 + byte;
            if index < input.len() {
                let (line, column) = (index / columns, index % columns);
                let block_row = line / rows * down + line % rows / block_rows;
                let scale = scales[block_row * across + column / block_columns];
                let value = f32::cast_from(input[index]) * scale;
                packed |= encode(value, format) << comptime!(8 * byte as u32);
            }
        }
        codes[word] = packed;
        word += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The codes by columns: a unit makes a tile of 4 by 4 of them, a word of each column.
#[cube(launch, create_dummy_kernel)]
fn columns_kernel<F: Numeric>(
    input: &[F],
    scales: &[f32],
    codes: &mut [u32],
    grid: Grid,
    #[comptime] format: CubeFormat,
    #[define(F)] _dtype: ElemType,
) {
    let (rows, columns) = (grid.rows as usize, grid.columns as usize);
    let (block_rows, block_columns) = (grid.block_rows as usize, grid.block_columns as usize);
    let (down, across) = (rows.div_ceil(block_rows), columns.div_ceil(block_columns));
    let column_words = rows.div_ceil(16) * 4;
    let tiles_across = columns.div_ceil(comptime!(4 * ACROSS as usize));
    let tiles_down = rows.div_ceil(comptime!(4 * DOWN as usize));
    let batches = input.len() / (rows * columns);
    let tiles = batches * tiles_down * tiles_across * comptime!((ACROSS * DOWN) as usize);
    let mut tile = ABSOLUTE_POS;
    while tile < tiles {
        let group = tile / comptime!((ACROSS * DOWN) as usize);
        let place = tile % comptime!((ACROSS * DOWN) as usize);
        let batch = group / (tiles_down * tiles_across);
        let row = (group / tiles_across % tiles_down * comptime!(DOWN as usize)
            + place / comptime!(ACROSS as usize))
            * 4;
        let column = (group % tiles_across * comptime!(ACROSS as usize)
            + place % comptime!(ACROSS as usize))
            * 4;
        #[unroll]
        for j in 0..4usize {
            if row < rows && column + j < columns {
                let mut packed = 0u32;
                #[unroll]
                for i in 0..4usize {
                    if row + i < rows {
                        let block_row = batch * down + (row + i) / block_rows;
                        let scale = scales[block_row * across + (column + j) / block_columns];
                        let value = input[(batch * rows + row + i) * columns + column + j];
                        let code = encode(f32::cast_from(value) * scale, format);
                        packed |= code << comptime!(8 * i as u32);
                    }
                }
                codes[(batch * columns + column + j) * column_words + row / 4] = packed;
            }
        }
        tile += CUBE_COUNT * CUBE_DIM as usize;
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::backend::ops::{FloatTensorOps, IntTensorOps};
    use burn::tensor::TensorData;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use burn_std::reader::try_read_sync;

    use super::*;

    /// Sizes on both sides of a word, a tile and their groups; batches; blocks that end within a tile. The peer is the cast
    /// row by row.
    #[test]
    fn codes_by_columns_are_those_by_rows() {
        let device = CubeDevice::Cpu(Default::default());
        let bytes = |tensor| {
            let data = try_read_sync(CubeBackend::int_into_data(tensor));
            data.unwrap().unwrap().try_to_vec::<u8>().unwrap()
        };
        let block = |rows, columns| Granularity::Block { rows, columns };
        for shape in [[1, 1, 1], [2, 3, 7], [2, 17, 34], [1, 20, 65], [2, 0, 3]] {
            for granularity in [Granularity::Column, block(6, 1), block(16, 16)] {
                let count = shape.iter().product();
                let number = |index| (index as f32 * 0.7).sin() * 20.0;
                let values: Vec<f32> = (0..count).map(number).collect();
                let cast = Fp8Cast::new(granularity, Fp8Format::E4M3);
                let quantize = |by_columns| {
                    let data = TensorData::new(values.clone(), shape);
                    let input = CubeBackend::float_from_data(data, &device);
                    quantize_blocks(input, cast, by_columns)
                };
                let [(found, scales), (expected, expected_scales)] = [true, false].map(quantize);
                assert_eq!(found.shape(), shape.into());
                assert_eq!(found.meta.strides()[1], 1);
                assert_eq!(found.meta.strides()[2] % 16, 0);
                if count > 0 {
                    assert_eq!(bytes(found), bytes(expected), "{shape:?}, {granularity:?}");
                    let floats = |tensor| try_read_sync(CubeBackend::float_into_data(tensor));
                    let [scales, expected] =
                        [scales, expected_scales].map(|s| floats(s).unwrap().unwrap());
                    assert_eq!(scales, expected);
                }
            }
        }
    }
}
