//! Products of attention's heads, which lie in between each other, on an NVIDIA GPU with the library.

use super::*;
use crate::rowwise::tests::on_devices;
use burn_backend::{TensorData, ops::FloatTensorOps};
use burn_std::bf16;
use burn_std::reader::try_read_sync;

const TEXTS: usize = 2;
const HEADS: usize = 3;
const TOKENS: usize = 5;
const COLUMNS: usize = 8;

/// A small whole number for each element: products of these are exact in bf16.
fn number(seed: usize, [text, head, row, column]: [usize; 4]) -> f32 {
    ((seed + text * 7 + head * 5 + row * 3 + column * 11) * 37 % 5) as f32 - 2.0
}

/// `[texts, heads, rows, columns]`, that lies as `order` says, outermost first.
fn tensor(seed: usize, columns: usize, order: [usize; 4], device: &CubeDevice) -> CubeTensor {
    let sizes = [TEXTS, HEADS, TOKENS, columns];
    let lies = order.map(|dim| sizes[dim]);
    let mut values = Vec::new();
    for place in 0..lies.iter().product() {
        let (mut rest, mut index) = (place, [0; 4]);
        for dim in order.into_iter().rev() {
            index[dim] = rest % sizes[dim];
            rest /= sizes[dim];
        }
        values.push(bf16::from_f32(number(seed, index)));
    }
    let back = [0, 1, 2, 3].map(|dim| order.iter().position(|&at| at == dim).expect("a dimension"));
    permute(
        CubeBackend::float_from_data(TensorData::new(values, lies), device),
        &back,
    )
}

/// `x y` by its definition; of `y` transposed if `turned`.
fn expected(inner: usize, columns: usize, turned: bool) -> Vec<f32> {
    let mut all = Vec::new();
    for at in 0..TEXTS * HEADS * TOKENS * columns {
        let (column, row) = (at % columns, at / columns % TOKENS);
        let (head, text) = (at / columns / TOKENS % HEADS, at / columns / TOKENS / HEADS);
        let term = |inner| {
            let [down, along] = if turned {
                [column, inner]
            } else {
                [inner, column]
            };
            number(1, [text, head, row, inner]) * number(2, [text, head, down, along])
        };
        all.push((0..inner).map(term).sum());
    }
    all
}

fn read(tensor: CubeTensor) -> Vec<f32> {
    let data = try_read_sync(CubeBackend::float_into_data(tensor));
    let values = data.unwrap().unwrap().try_to_vec::<bf16>().unwrap();
    values.into_iter().map(bf16::to_f32).collect()
}

/// The first time, the library computes them in both ways that it has, and later in the faster one.
#[test]
fn kernels_multiply_heads_however_they_lie() {
    on_devices(|device| {
        let Some(library) = library(device) else {
            println!("SKIPPED: {device:?} has no cuBLASLt");
            return;
        };
        // Tokens, then heads, as a linear layer computes them.
        let as_rows = [0, 2, 1, 3];
        for _ in 0..3 {
            let [queries, keys] = [1, 2].map(|seed| tensor(seed, COLUMNS, as_rows, device));
            let keys = permute(keys, &[0, 1, 3, 2]);
            let scores = by_library(&library, &queries, &keys).expect("it has an algorithm");
            assert_eq!(read(scores), expected(COLUMNS, TOKENS, true));

            let weights = tensor(1, TOKENS, [0, 1, 2, 3], device);
            let values = tensor(2, COLUMNS, as_rows, device);
            let output = by_library(&library, &weights, &values).expect("it has an algorithm");
            assert_eq!(read(output), expected(TOKENS, COLUMNS, false));
        }
    });
}
