//! What does autocast cost and save? The same program on the plain device, on the autocast device with
//! everything in f32 (`O0`: the cost of the layer), and in bf16.

use benches::Precision;
use burn::{
    nn::loss::CrossEntropyLossConfig,
    optim::{GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{Device, Distribution, Int, Tensor, activation},
};
use divan::{Bencher, counter::ItemsCount};
use examples::resnet::{ResNet, ResNetConfig};

fn main() {
    divan::main();
}

const PRECISIONS: [Precision; 3] = [Precision::Plain, Precision::O0, Precision::Bf16];

/// What does an op cost? Chains of 200 elementwise ops over tensors of so many elements.
#[divan::bench(args = PRECISIONS, consts = [1, 1_024, 65_536], sample_count = 20)]
fn elementwise_op<const ELEMENTS: usize>(bencher: Bencher, precision: Precision) {
    const OPS: usize = 200;
    let device = precision.device(Device::flex());
    let x = Tensor::<1>::random([ELEMENTS], Distribution::Default, &device);
    bencher.counter(ItemsCount::new(OPS)).bench_local(|| {
        let mut y = x.clone();
        for _ in 0..OPS / 2 {
            y = activation::relu(y + 1.0);
        }
        y.sum().into_scalar::<f32>()
    });
}

/// What does a matrix product cost, casts included? `[n, n]` times `[n, n]`.
#[divan::bench(args = PRECISIONS, consts = [64, 512], sample_count = 20)]
fn matmul<const N: usize>(bencher: Bencher, precision: Precision) {
    let device = precision.device(Device::flex());
    let a = Tensor::<2>::random([N, N], Distribution::Default, &device);
    let b = Tensor::<2>::random([N, N], Distribution::Default, &device);
    bencher.bench_local(|| a.clone().matmul(b.clone()).sum().into_scalar::<f32>());
}

/// What does a training step of ResNet-20 (He et al. 2015) cost? Batch 16 of 3x32x32.
#[divan::bench(args = PRECISIONS, sample_count = 5, sample_size = 1)]
fn resnet20_step(bencher: Bencher, precision: Precision) {
    let device = precision.device(Device::flex()).autodiff();
    let images = Tensor::random([16, 3, 32, 32], Distribution::Default, &device);
    let labels = Tensor::<1, Int>::arange(0..16, &device).remainder_scalar(10);
    let mut training = Some((
        ResNetConfig::new(20, 16).init(&device),
        SgdConfig::new().init(),
    ));
    let step = |(model, mut optimizer): (ResNet, ModuleOptimizer)| {
        let loss = CrossEntropyLossConfig::new()
            .init(&device)
            .forward(model.forward(images.clone()), labels.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let model = optimizer.step(0.01, model, gradients);
        device.sync().expect("the device computes");
        (model, optimizer)
    };
    bencher
        .counter(ItemsCount::new(16usize))
        .bench_local(|| training = training.take().map(step));
}
