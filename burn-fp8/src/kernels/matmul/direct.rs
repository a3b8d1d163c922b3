//! One kernel that decodes in registers: for small products, where a launch costs more than the arithmetic.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{kernel::cast, tensor::CubeTensor};
use cubecl::{ir::types::Fp8Format as CubeFormat, prelude::*};

use super::{Product, batch::tensor_starts, routine::Routine};
use crate::{
    Bias,
    custom::matmul_shape,
    kernels::{
        amax::raise,
        buffer,
        codec::{cube_format, float_to, load, magnitude_bits},
    },
};

/// Output rows and columns of a unit.
const TILE: usize = 4;

/// See [`MatmulRoutine::Direct`](super::MatmulRoutine::Direct).
pub(super) struct Direct;

impl Routine for Direct {
    fn matmul(&self, product: Product) -> CubeTensor {
        matmul(product)
    }
}

fn matmul(product: Product) -> CubeTensor {
    let Product {
        lhs,
        rhs,
        lhs_scale,
        rhs_scale,
        bias,
        spec,
        amax,
    } = product;
    let (left, right) = (lhs.shape(), rhs.shape());
    let shape = matmul_shape(&left, &right);
    let output = buffer::empty_floats(&lhs, shape.clone(), DType::from(spec.output));
    if shape.num_elements() == 0 {
        return output;
    }
    let rank = shape.num_dims();
    let [m, n, k] = [shape[rank - 2], shape[rank - 1], left[rank - 1]];
    let batches = shape.num_elements() / (m * n);
    let client = lhs.client.clone();
    // Where each matrix of the batch starts, on both sides.
    let [lhs_starts, rhs_starts] = [&lhs, &rhs].map(|side| tensor_starts(side, &shape));
    let offsets: Vec<u32> = lhs_starts
        .iter()
        .zip(&rhs_starts)
        .flat_map(|(&left, &right)| [left as u32, right as u32])
        .collect();
    let offsets = client.create_from_slice(bytemuck::cast_slice(&offsets));
    let strides = |side: &CubeTensor| {
        let strides = side.meta.strides();
        [strides[rank - 2] as u32, strides[rank - 1] as u32]
    };
    let [lhs_row, lhs_column] = strides(&lhs);
    let [rhs_row, rhs_column] = strides(&rhs);
    let (has_bias, bias) = match bias {
        Bias::None => (false, lhs_scale.clone()),
        Bias::Row(bias) => (true, cast(bias, DType::F32)),
    };
    let tiles = batches * m.div_ceil(TILE) * n.div_ceil(TILE);
    let (count, dim) = buffer::grid(&client, tiles);
    matmul_kernel::launch(
        &client,
        count,
        dim,
        buffer::code_words(&lhs),
        buffer::code_words(&rhs),
        buffer::elements(lhs_scale),
        buffer::elements(rhs_scale),
        buffer::elements(bias),
        buffer::raw(offsets, 2 * batches),
        buffer::raw(output.handle.clone(), shape.num_elements()),
        MatrixLaunch::new(lhs_row, lhs_column),
        MatrixLaunch::new(rhs_row, rhs_column),
        buffer::amax(&client, &amax),
        m as u32,
        n as u32,
        k as u32,
        has_bias,
        amax.is_some(),
        cube_format(spec.lhs),
        cube_format(spec.rhs),
        output.dtype == DType::BF16,
        dtype_to_storage_type(output.dtype),
    );
    output
}

/// Strides of a matrix of codes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Matrix {
    row: u32,
    column: u32,
}

/// A unit makes a tile of the output from rows and columns that it decodes itself; sums are in f32, in the order of k.
#[cube(launch)]
fn matmul_kernel<F: Numeric>(
    lhs: &[u32],
    rhs: &[u32],
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    bias: &[f32],
    offsets: &[u32],
    output: &mut [F],
    left: Matrix,
    right: Matrix,
    amax: &[Atomic<u32>],
    m: u32,
    n: u32,
    k: u32,
    #[comptime] has_bias: bool,
    #[comptime] has_amax: bool,
    #[comptime] lhs_format: CubeFormat,
    #[comptime] rhs_format: CubeFormat,
    #[comptime] bf16: bool,
    #[define(F)] _dtype: ElemType,
) {
    let tile_rows = m.div_ceil(TILE as u32) as usize;
    let tile_columns = n.div_ceil(TILE as u32) as usize;
    let tiles = offsets.len() / 2 * tile_rows * tile_columns;
    let lhs_inverse = 1.0f32 / lhs_scale[0];
    let rhs_inverse = 1.0f32 / rhs_scale[0];

    let mut max = 0u32;
    let mut tile = ABSOLUTE_POS;
    while tile < tiles {
        let batch = tile / (tile_rows * tile_columns);
        let row = tile / tile_columns % tile_rows * TILE;
        let column = tile % tile_columns * TILE;
        let lhs_start = offsets[2 * batch] as usize;
        let rhs_start = offsets[2 * batch + 1] as usize;

        let mut sums = Array::<f32>::new(comptime!(TILE * TILE));
        #[unroll]
        for index in 0..comptime!(TILE * TILE) {
            sums[index] = 0.0f32;
        }
        let mut factors = Array::<f32>::new(TILE);
        for inner in 0..k as usize {
            // Rows and columns beyond the edge repeat the last one; their sums are dropped.
            #[unroll]
            for j in 0..TILE {
                let column = usize::min(column + j, n as usize - 1);
                let index = rhs_start + inner * right.row as usize + column * right.column as usize;
                factors[j] = load(rhs, index, rhs_format);
            }
            #[unroll]
            for i in 0..TILE {
                let row = usize::min(row + i, m as usize - 1);
                let index = lhs_start + row * left.row as usize + inner * left.column as usize;
                let factor = load(lhs, index, lhs_format);
                #[unroll]
                for j in 0..TILE {
                    sums[comptime!(i * TILE + j)] += factor * factors[j];
                }
            }
        }

        #[unroll]
        for i in 0..TILE {
            #[unroll]
            for j in 0..TILE {
                let (row, column) = (row + i, column + j);
                if row < m as usize && column < n as usize {
                    let mut value = sums[comptime!(i * TILE + j)] * lhs_inverse * rhs_inverse;
                    if has_bias {
                        value += bias[column];
                    }
                    let value = float_to::<F>(value, bf16);
                    output[(batch * m as usize + row) * n as usize + column] = value;
                    if has_amax {
                        max = u32::max(max, magnitude_bits(f32::cast_from(value)));
                    }
                }
            }
        }
        tile += CUBE_COUNT * CUBE_DIM as usize;
    }
    if has_amax {
        raise(amax, max);
    }
}
