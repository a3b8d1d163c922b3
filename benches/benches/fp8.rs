//! What do fp8 casts, products and layers cost on Flex, beside Burn's own in f32? No kernel there uses fp8 instructions: fp8
//! can only lose time, and the question is how much.

use burn::{
    nn::{Linear, LinearConfig},
    tensor::{Device, Distribution, FloatDType, Tensor},
};
use burn_fp8::{
    Fp8Format, Fp8Linear, Fp8Tensor, amax,
    recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RowwiseScaling},
    scaled_matmul,
};
use divan::{Bencher, counter::BytesCount, counter::ItemsCount};
use std::fmt;

fn main() {
    divan::main();
}

/// How a layer is run.
#[derive(Clone, Copy, Debug)]
enum Layer {
    F32,
    Delayed,
    Current,
    Rowwise,
    Block,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Delayed => "fp8 delayed",
            Self::Current => "fp8 current",
            Self::Rowwise => "fp8 rowwise",
            Self::Block => "fp8 block",
        })
    }
}

fn matrix(shape: [usize; 2]) -> Tensor<2> {
    Tensor::random(shape, Distribution::Default, &Device::flex())
}

/// How fast is a tensor read for its amax? Bytes read.
#[divan::bench(consts = [1_024, 1_048_576])]
fn largest_magnitude<const ELEMENTS: usize>(bencher: Bencher) {
    let x = matrix([1, ELEMENTS]);
    bencher
        .counter(BytesCount::new(4 * ELEMENTS))
        .bench_local(|| amax(x.clone()));
}

/// How fast is a cast with a scale at hand, amax included? Bytes read and written.
#[divan::bench(args = Fp8Format::ALL, consts = [1_024, 1_048_576])]
fn quantize<const ELEMENTS: usize>(bencher: Bencher, format: Fp8Format) {
    let x = matrix([1, ELEMENTS]);
    let scale = Tensor::<1>::ones([1], &Device::flex());
    bencher
        .counter(BytesCount::new(5 * ELEMENTS))
        .bench_local(|| Fp8Tensor::quantize_with_device_scale(x.clone(), scale.clone(), format));
}

/// The way back. Bytes read and written.
#[divan::bench(consts = [1_024, 1_048_576])]
fn dequantize<const ELEMENTS: usize>(bencher: Bencher) {
    let x = Fp8Tensor::quantize(matrix([1, ELEMENTS]), Fp8Format::E4M3);
    bencher
        .counter(BytesCount::new(5 * ELEMENTS))
        .bench_local(|| x.dequantize(FloatDType::F32));
}

/// A product of `[n, n]` by `[n, n]` in f32, by Burn. Items are floating-point operations.
#[divan::bench(consts = [64, 512])]
fn matmul_f32<const N: usize>(bencher: Bencher) {
    let (a, b) = (matrix([N, N]), matrix([N, N]));
    bencher
        .counter(ItemsCount::new(2 * N * N * N))
        .bench_local(|| a.clone().matmul(b.clone()));
}

/// The same of tensors that are in fp8 already.
#[divan::bench(consts = [64, 512])]
fn matmul_fp8<const N: usize>(bencher: Bencher) {
    let [a, b] = [(); 2].map(|()| Fp8Tensor::quantize(matrix([N, N]), Fp8Format::E4M3));
    bencher
        .counter(ItemsCount::new(2 * N * N * N))
        .bench_local(|| scaled_matmul(&a, &b, None, FloatDType::F32));
}

/// Forward and backward of a layer of 512 to 512, batch 256.
#[divan::bench(
    args = [Layer::F32, Layer::Delayed, Layer::Current, Layer::Rowwise, Layer::Block],
    sample_count = 20
)]
fn linear_step(bencher: Bencher, layer: Layer) {
    let device = Device::flex().autodiff();
    let x = Tensor::<2>::random([256, 512], Distribution::Default, &device).require_grad();
    let linear = LinearConfig::new(512, 512).init(&device);
    let fp8 = |linear: Linear, recipe: Fp8Recipe| {
        Fp8Linear::from_linear(linear, recipe).expect("the recipe is valid")
    };
    let layer = match layer {
        Layer::F32 => Err(linear),
        Layer::Delayed => Ok(fp8(linear, DelayedScaling::new().into())),
        Layer::Current => Ok(fp8(linear, CurrentScaling::new().into())),
        Layer::Rowwise => Ok(fp8(linear, RowwiseScaling::new().into())),
        Layer::Block => Ok(fp8(linear, BlockScaling::new().into())),
    };
    bencher.bench_local(|| {
        let output = match &layer {
            Ok(layer) => layer.forward(x.clone()),
            Err(layer) => layer.forward(x.clone()),
        };
        output.sum().backward()
    });
}
