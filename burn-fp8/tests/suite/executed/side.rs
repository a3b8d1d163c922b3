//! Operands of products: codes and scales, and their layout.

use burn::backend::ops::IntTensorOps;
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, cubecl::client::Client, tensor::CubeTensor};
use burn_fp8::{Fp8Format, Granularity};

use super::super::{device::Random, gpu::tensor, random::reference};
use ptx_machine::Fp8;

fn meaning(format: Fp8Format) -> Fp8 {
    match format {
        Fp8Format::E4M3 => Fp8::E4m3,
        Fp8Format::E5M2 => Fp8::E5m2,
    }
}

/// Which codes a side has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Codes {
    /// Those of numbers up to 8, so that sums do not overflow in f16.
    Small,
    Finite,
    Any,
}

impl Codes {
    fn include(self, value: f64) -> bool {
        match self {
            Self::Small => value.abs() <= 8.0,
            Self::Finite => value.is_finite(),
            Self::Any => true,
        }
    }
}

/// A batch of matrices of codes with their scales, all as `[batch, rows, columns]`, with the inner dimension of the product as
/// the columns.
pub(super) struct Side {
    format: Fp8Format,
    codes: Vec<u8>,
    shape: [usize; 3],
    scales: Vec<f32>,
    scale_shape: [usize; 3],
    /// The place of each element's scale.
    places: Vec<usize>,
}

impl Side {
    /// # Panics
    /// If `shape` has no elements.
    pub(super) fn new(
        random: &mut Random,
        format: Fp8Format,
        codes: Codes,
        shape: [usize; 3],
        granularity: Granularity,
    ) -> Self {
        // Subnormals among them.
        let usable: Vec<u8> = (0..=u8::MAX)
            .filter(|&code| codes.include(meaning(format).value(code)))
            .collect();
        let code = |random: &mut Random| usable[random.bits() as usize % usable.len()];
        let scale = |random: &mut Random| 0.5 + (random.bits() % 64) as f32 / 16.0;
        let (scale_shape, places) = reference::places(granularity, &shape);
        let (elements, scales) = (places.len(), scale_shape.iter().product());
        Self {
            format,
            codes: (0..elements).map(|_| code(random)).collect(),
            shape,
            scales: (0..scales).map(|_| scale(random)).collect(),
            scale_shape: scale_shape.try_into().unwrap(),
            places,
        }
    }

    pub(super) fn value(&self, batch: usize, row: usize, column: usize) -> f64 {
        let [batches, rows, columns] = self.shape;
        let index = (batch % batches * rows + row) * columns + column;
        let scale = f64::from(self.scales[self.places[index]]);
        meaning(self.format).value(self.codes[index]) / scale
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
        let scales = oriented(client, scales, self.scale_shape, DType::F32, right, false);
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
