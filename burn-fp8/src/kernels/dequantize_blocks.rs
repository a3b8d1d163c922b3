use burn::backend::TensorMetadata;
use burn::tensor::{DType, FloatDType};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{ops::reshape, tensor::CubeTensor};
use cubecl::prelude::*;

use super::{
    batch::{side_by_side, tensor_starts},
    buffer,
    codec::{by_hand, float_to, load},
    scale_grid::{ScaleGrid, Scales, scale_index},
};
use crate::{Fp8Format, Granularity};

/// [`Fp8Ops::fp8_dequantize`](crate::Fp8Ops::fp8_dequantize) with several scales.
pub(crate) fn dequantize_blocks(
    codes: CubeTensor,
    scale: CubeTensor,
    granularity: Granularity,
    format: Fp8Format,
    dtype: FloatDType,
) -> CubeTensor {
    let scales = Scales {
        tensor: scale,
        granularity,
    };
    if codes.meta.num_dims() > 1 {
        return dequantize(codes, scales, format, dtype);
    }
    let shape = codes.shape();
    let row = dequantize(buffer::into_row(codes), scales.into_row(), format, dtype);
    reshape(row, shape)
}

pub(in crate::kernels) fn dequantize(
    codes: CubeTensor,
    scales: Scales,
    format: Fp8Format,
    dtype: FloatDType,
) -> CubeTensor {
    let (shape, rank) = (codes.shape(), codes.meta.num_dims());
    let [row_stride, column_stride] = [rank - 2, rank - 1].map(|dim| codes.meta.strides()[dim]);
    if row_stride == 1 && column_stride != 1 {
        // Codes are read, and values written, in the memory order of the codes.
        let values = dequantize(buffer::swapped(codes), scales.swapped(), format, dtype);
        return buffer::swapped(values);
    }
    let output = buffer::empty_floats(&codes, shape.clone(), DType::from(dtype));
    let length = shape.num_elements();
    if length == 0 {
        return output;
    }
    let client = codes.client.clone();
    let starts = [tensor_starts(&codes, &shape), scales.starts(&shape)];
    let (count, dim) = buffer::grid(&client, length);
    dequantize_kernel::launch(
        &client,
        count,
        dim,
        buffer::code_words(&codes),
        scales.elements(),
        side_by_side(&client, starts),
        buffer::whole(&output),
        scales.grid(),
        shape[rank - 2] as u32,
        shape[rank - 1] as u32,
        row_stride as u32,
        column_stride as u32,
        format,
        by_hand(&client, output.dtype),
        dtype_to_storage_type(output.dtype),
    );
    output
}

#[cube(launch)]
fn dequantize_kernel<F: Numeric>(
    codes: &[u32],
    scales: &[f32],
    starts: &[u32],
    output: &mut [F],
    grid: ScaleGrid,
    rows: u32,
    columns: u32,
    row_stride: u32,
    column_stride: u32,
    #[comptime] format: Fp8Format,
    #[comptime] by_hand: bool,
    #[define(F)] _dtype: ElemType,
) {
    let (rows, columns) = (rows as usize, columns as usize);
    let mut index = ABSOLUTE_POS;
    while index < output.len() {
        let (line, column) = (index / columns, index % columns);
        let (batch, row) = (line / rows, line % rows);
        let code = starts[2 * batch] as usize
            + row * row_stride as usize
            + column * column_stride as usize;
        let start = starts[2 * batch + 1] as usize;
        let scale = scales[scale_index(&grid, start, row, column)];
        output[index] = float_to::<F>(load(codes, code, format) / scale, by_hand);
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
}
