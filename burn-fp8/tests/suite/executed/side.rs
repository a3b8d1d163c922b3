//! Operands of products: codes and scales, and their layout.

use burn::backend::ops::IntTensorOps;
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, cubecl::client::Client, tensor::CubeTensor};
use burn_fp8::Fp8Format;

use super::super::{device::Random, gpu::tensor};
use crate::ptx::Fp8;

fn meaning(format: Fp8Format) -> Fp8 {
    match format {
        Fp8Format::E4M3 => Fp8::E4m3,
        Fp8Format::E5M2 => Fp8::E5m2,
    }
}

/// A batch of matrices of codes with their scales, all as `[batch, rows, columns]`, with the inner dimension of the product as
/// the columns.
pub(super) struct Side {
    format: Fp8Format,
    codes: Vec<u8>,
    shape: [usize; 3],
    /// The numbers of rows and of columns that share a scale.
    block: [usize; 2],
    pub(super) scales: Vec<f32>,
}

impl Side {
    pub(super) fn new(
        random: &mut Random,
        format: Fp8Format,
        shape: [usize; 3],
        block: [usize; 2],
    ) -> Self {
        // Including subnormals, and small enough that f16 does not overflow.
        let usable: Vec<u8> = (0..=u8::MAX)
            .filter(|&code| meaning(format).value(code).abs() <= 8.0)
            .collect();
        let count = shape.iter().product();
        let mut codes = Vec::with_capacity(count);
        codes.resize_with(count, || usable[random.bits() as usize % usable.len()]);
        let grid = shape[0] * shape[1].div_ceil(block[0]) * shape[2].div_ceil(block[1]);
        let mut scales = Vec::with_capacity(grid);
        scales.resize_with(grid, || 0.5 + (random.bits() % 64) as f32 / 16.0);
        Self {
            format,
            codes,
            shape,
            block,
            scales,
        }
    }

    fn scale_shape(&self) -> [usize; 3] {
        let [batch, rows, columns] = self.shape;
        [
            batch,
            rows.div_ceil(self.block[0]),
            columns.div_ceil(self.block[1]),
        ]
    }

    pub(super) fn value(&self, batch: usize, row: usize, column: usize) -> f64 {
        let batch = batch % self.shape[0];
        let code = self.codes[(batch * self.shape[1] + row) * self.shape[2] + column];
        let [_, down, across] = self.scale_shape();
        let scale = (batch * down + row / self.block[0]) * across + column / self.block[1];
        meaning(self.format).value(code) / f64::from(self.scales[scale])
    }

    /// Codes and scales as tensors. For a right side, the last two dimensions are swapped. With `by_strides`, the codes are a
    /// view of memory that is stored the other way round.
    pub(super) fn tensors(
        &self,
        client: &Client,
        right: bool,
        by_strides: bool,
    ) -> [CubeTensor; 2] {
        let scales: &[u8] = bytemuck::cast_slice(&self.scales);
        let codes = oriented(
            client,
            &self.codes,
            self.shape,
            DType::U8,
            right,
            by_strides,
        );
        // Scales are never such a view.
        let scales = oriented(client, scales, self.scale_shape(), DType::F32, right, false);
        [codes, scales]
    }
}

/// `[batch, rows, columns]`, or its transpose for a right side. With `by_strides`, a view of memory that is stored the other way
/// round.
fn oriented(
    client: &Client,
    bytes: &[u8],
    [batch, rows, columns]: [usize; 3],
    dtype: DType,
    right: bool,
    by_strides: bool,
) -> CubeTensor {
    let size = dtype.size();
    let turned = |bytes: &[u8]| -> Vec<u8> {
        let place = |index: usize| {
            let (matrix, inner) = (index / (rows * columns), index % (rows * columns));
            let (column, row) = (inner / rows, inner % rows);
            (matrix * rows + row) * columns + column
        };
        (0..batch * rows * columns)
            .flat_map(|index| bytes[size * place(index)..][..size].to_vec())
            .collect()
    };
    // Memory is transposed either for a right side or for a view, and not at all for both.
    let memory = match right != by_strides {
        true => turned(bytes),
        false => bytes.to_vec(),
    };
    let shape = match right != by_strides {
        true => [batch, columns, rows],
        false => [batch, rows, columns],
    };
    let tensor = tensor(client, &memory, &shape, dtype);
    match by_strides {
        true => CubeBackend::int_swap_dims(tensor, 1, 2),
        false => tensor,
    }
}
