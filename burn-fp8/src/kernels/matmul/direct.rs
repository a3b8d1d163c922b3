//! One kernel that decodes in registers, for small products, where a launch costs more than the arithmetic.

use burn::tensor::DType;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{Product, Size, routine::Routine};
use crate::{
    Fp8Format,
    granular::scaled_together,
    kernels::{
        amax::raise,
        batch::{side_by_side, tensor_starts},
        buffer,
        codec::{by_hand, float_to, load, magnitude_bits},
        scale_grid::{ScaleGrid, scale_index},
    },
};

/// The numbers of output rows and of output columns that a unit computes at a time.
const TILE: usize = 4;

/// See [`MatmulRoutine::Direct`](super::MatmulRoutine::Direct).
pub(super) struct Direct;

impl Routine for Direct {
    fn matmul(&self, product: Product) -> CubeTensor {
        let shape = product.shape();
        let Size { m, n, k, batches } = product.size();
        let together = scaled_together(product.spec.granularities).unwrap_or(k);
        let Product {
            lhs,
            rhs,
            lhs_scales,
            rhs_scales,
            bias,
            spec,
            amax,
        } = product;
        let output = buffer::empty_floats(&lhs, shape.clone(), DType::from(spec.output));
        if shape.num_elements() == 0 {
            return output;
        }
        let rank = shape.num_dims();
        let client = lhs.client.clone();
        let starts = [
            tensor_starts(&lhs, &shape),
            tensor_starts(&rhs, &shape),
            lhs_scales.starts(&shape),
            rhs_scales.starts(&shape),
        ];
        let strides = |side: &CubeTensor| {
            let strides = side.meta.strides();
            [strides[rank - 2] as u32, strides[rank - 1] as u32]
        };
        let [lhs_row, lhs_column] = strides(&lhs);
        let [rhs_row, rhs_column] = strides(&rhs);
        let tiles = batches * m.div_ceil(TILE) * n.div_ceil(TILE);
        let (count, dim) = buffer::grid(&client, tiles);
        matmul_kernel::launch(
            &client,
            count,
            dim,
            buffer::code_words(&lhs),
            buffer::code_words(&rhs),
            lhs_scales.elements(),
            rhs_scales.elements(),
            buffer::bias(&client, &bias),
            side_by_side(&client, starts),
            buffer::whole(&output),
            MatrixLaunch::new(lhs_row, lhs_column),
            MatrixLaunch::new(rhs_row, rhs_column),
            lhs_scales.grid(),
            rhs_scales.grid(),
            buffer::amax(&client, &amax),
            m as u32,
            n as u32,
            k as u32,
            together.clamp(1, k.max(1)) as u32,
            bias.row().is_some(),
            amax.is_some(),
            spec.lhs,
            spec.rhs,
            by_hand(&client, output.dtype),
            dtype_to_storage_type(output.dtype),
        );
        output
    }
}

/// Strides of a matrix of codes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Matrix {
    row: u32,
    column: u32,
}

/// Each unit computes one tile of the output at a time, from rows and columns that it decodes itself. Sums are in f32, in the
/// order of k, and scaled every `together` terms.
#[cube(launch)]
fn matmul_kernel<F: Numeric>(
    lhs: &[u32],
    rhs: &[u32],
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    bias: &[f32],
    starts: &[u32],
    output: &mut [F],
    left: Matrix,
    right: Matrix,
    left_scales: ScaleGrid,
    right_scales: ScaleGrid,
    amax: &[Atomic<u32>],
    m: u32,
    n: u32,
    k: u32,
    together: u32,
    #[comptime] has_bias: bool,
    #[comptime] has_amax: bool,
    #[comptime] lhs_format: Fp8Format,
    #[comptime] rhs_format: Fp8Format,
    #[comptime] by_hand: bool,
    #[define(F)] _dtype: ElemType,
) {
    let tile_rows = m.div_ceil(TILE as u32) as usize;
    let tile_columns = n.div_ceil(TILE as u32) as usize;
    let tiles = starts.len() / 4 * tile_rows * tile_columns;
    let (m, n, k, together) = (m as usize, n as usize, k as usize, together as usize);

    let mut max = 0u32;
    let mut tile = ABSOLUTE_POS;
    while tile < tiles {
        let batch = tile / (tile_rows * tile_columns);
        let row = tile / tile_columns % tile_rows * TILE;
        let column = tile % tile_columns * TILE;
        let lhs_start = starts[4 * batch] as usize;
        let rhs_start = starts[4 * batch + 1] as usize;
        let lhs_scale_start = starts[4 * batch + 2] as usize;
        let rhs_scale_start = starts[4 * batch + 3] as usize;

        let mut totals = Array::<f32>::new(comptime!(TILE * TILE));
        #[unroll]
        for index in 0..comptime!(TILE * TILE) {
            totals[index] = 0.0f32;
        }
        let mut factors = Array::<f32>::new(TILE);
        for slice in 0..k.div_ceil(together) {
            let first = slice * together;
            let mut sums = Array::<f32>::new(comptime!(TILE * TILE));
            #[unroll]
            for index in 0..comptime!(TILE * TILE) {
                sums[index] = 0.0f32;
            }
            for inner in first..usize::min(first + together, k) {
                // Rows and columns beyond the edge repeat the last one, and their sums are dropped.
                #[unroll]
                for j in 0..TILE {
                    let column = usize::min(column + j, n - 1);
                    let index =
                        rhs_start + inner * right.row as usize + column * right.column as usize;
                    factors[j] = load(rhs, index, rhs_format);
                }
                #[unroll]
                for i in 0..TILE {
                    let row = usize::min(row + i, m - 1);
                    let index = lhs_start + row * left.row as usize + inner * left.column as usize;
                    let factor = load(lhs, index, lhs_format);
                    #[unroll]
                    for j in 0..TILE {
                        sums[comptime!(i * TILE + j)] += factor * factors[j];
                    }
                }
            }
            #[unroll]
            for j in 0..TILE {
                let column = usize::min(column + j, n - 1);
                let index = scale_index(&right_scales, rhs_scale_start, first, column);
                factors[j] = 1.0f32 / rhs_scale[index];
            }
            #[unroll]
            for i in 0..TILE {
                let row = usize::min(row + i, m - 1);
                let index = scale_index(&left_scales, lhs_scale_start, row, first);
                let inverse = 1.0f32 / lhs_scale[index];
                #[unroll]
                for j in 0..TILE {
                    let index = comptime!(i * TILE + j);
                    totals[index] += sums[index] * inverse * factors[j];
                }
            }
        }

        #[unroll]
        for i in 0..TILE {
            #[unroll]
            for j in 0..TILE {
                let (row, column) = (row + i, column + j);
                if row < m && column < n {
                    let mut value = totals[comptime!(i * TILE + j)];
                    if has_bias {
                        value += bias[column];
                    }
                    let value = float_to::<F>(value, by_hand);
                    output[(batch * m + row) * n + column] = value;
                    if has_amax {
                        max = u32::max(max, magnitude_bits(f32::cast_from(value)));
                    }
                }
            }
        }
        tile += CUBE_COUNT * CUBE_DIM as usize;
    }
    if has_amax {
        raise(amax, 0usize, max);
    }
}
