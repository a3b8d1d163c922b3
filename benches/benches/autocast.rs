//! What does autocast cost and save, op by op? The same program on the plain device, on the autocast device with
//! everything in f32 (`O0`: the cost of the layer), and in bf16. `steps` asks the same of whole training steps.
//!
//! Every bench waits for its result, so that what is queued counts.

use benches::Precision;
use burn::tensor::{Device, Distribution, Tensor, activation};
use divan::{Bencher, counter::ItemsCount};

fn main() {
    divan::main();
}

const PRECISIONS: [Precision; 3] = [Precision::Plain, Precision::O0, Precision::Bf16];

/// Elementwise ops in a row, on how many elements each.
#[derive(Clone, Copy)]
struct Chain {
    precision: Precision,
    ops: usize,
    elements: usize,
}

impl std::fmt::Display for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            precision,
            ops,
            elements,
        } = self;
        write!(f, "{ops:>4} ops of {elements:>6}, {precision}")
    }
}

/// Short chains show what a readback costs, long ones what an op costs; small tensors show the cost of the layer,
/// large ones that of its lost in-place reuse.
fn chains() -> impl Iterator<Item = Chain> {
    let sizes = [
        (1, 1),
        (10, 1),
        (100, 1),
        (1_000, 1),
        (100, 1_024),
        (100, 65_536),
    ];
    sizes.into_iter().flat_map(|(ops, elements)| {
        PRECISIONS.map(|precision| Chain {
            precision,
            ops,
            elements,
        })
    })
}

/// What does an op cost? Chains of elementwise ops, read back at the end.
#[divan::bench(args = chains(), sample_count = 20, max_time = 1)]
fn elementwise_ops(bencher: Bencher, chain: Chain) {
    let device = chain.precision.device(Device::flex());
    let x = Tensor::<1>::random([chain.elements], Distribution::Default, &device);
    bencher.counter(ItemsCount::new(chain.ops)).bench_local(|| {
        let mut y = x.clone();
        for op in 0..chain.ops {
            y = if op % 2 == 0 {
                y + 1.0
            } else {
                activation::relu(y)
            };
        }
        y.into_data()
    });
}

/// What does a matrix product cost, casts included? `[n, n]` times `[n, n]`, ten in a row by the same matrix, as a
/// parameter is used.
#[divan::bench(args = PRECISIONS, consts = [16, 64, 256, 512], sample_count = 10, max_time = 2)]
fn matmul<const N: usize>(bencher: Bencher, precision: Precision) {
    const PRODUCTS: usize = 10;
    let device = precision.device(Device::flex());
    let x = Tensor::<2>::random([N, N], Distribution::Default, &device);
    let weight = Tensor::<2>::random([N, N], Distribution::Default, &device) / N as f32;
    bencher.counter(ItemsCount::new(PRODUCTS)).bench_local(|| {
        let mut y = x.clone();
        for _ in 0..PRODUCTS {
            y = y.matmul(weight.clone());
        }
        y.into_data()
    });
}
