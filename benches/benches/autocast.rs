//! What does autocast cost and save? The same program on the plain device, on the autocast device with
//! everything in f32 (`O0`: the cost of the layer), and in bf16.
//!
//! Every bench waits for its result, so that what is queued counts.

use benches::Precision;
use burn::{
    module::Module,
    nn::loss::CrossEntropyLossConfig,
    optim::{GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{Device, Distribution, Int, Tensor, activation},
};
use divan::{Bencher, counter::ItemsCount};
use examples::{resnet::ResNetConfig, transformer::TransformerConfig};

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

/// Images of a training step.
const BATCH: usize = 16;

/// Training steps of a classifier of 3x32x32 images.
fn training_step<M: Module>(
    bencher: Bencher,
    precision: Precision,
    init: impl Fn(&Device) -> M,
    forward: impl Fn(&M, Tensor<4>) -> Tensor<2>,
) {
    let device = precision.device(Device::flex()).autodiff();
    let images = Tensor::random([BATCH, 3, 32, 32], Distribution::Default, &device);
    let labels = Tensor::<1, Int>::arange(0..BATCH as i64, &device).remainder_scalar(10);
    let criterion = CrossEntropyLossConfig::new().init(&device);
    let step = |(model, mut optimizer): (M, ModuleOptimizer)| {
        let loss = criterion.forward(forward(&model, images.clone()), labels.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let model = optimizer.step(0.01, model, gradients);
        device.sync().expect("the device computes");
        (model, optimizer)
    };
    let mut training = Some((init(&device), SgdConfig::new().init()));
    bencher
        .counter(ItemsCount::new(BATCH))
        .bench_local(|| training = training.take().map(&step));
}

/// What does a training step of ResNet-20 (He et al. 2015) cost?
#[divan::bench(args = PRECISIONS, sample_count = 7, sample_size = 1)]
fn resnet20_step(bencher: Bencher, precision: Precision) {
    let init = |device: &Device| ResNetConfig::new(20, 16).init(device);
    training_step(bencher, precision, init, |model, images| {
        model.forward(images)
    });
}

/// What does a training step of a vision transformer of four layers of width 128 cost?
#[divan::bench(args = PRECISIONS, sample_count = 10, sample_size = 1)]
fn transformer_step(bencher: Bencher, precision: Precision) {
    let init = |device: &Device| TransformerConfig::new(4, 128).init(device);
    training_step(bencher, precision, init, |model, images| {
        model.forward(images)
    });
}
