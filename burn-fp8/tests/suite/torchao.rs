//! The signal-to-noise ratios that torchao's tests of fp8 ask for (`test/float8`), beside those of single layers.

use burn::nn::Linear;
use burn::tensor::{FloatDType, Tensor, activation::silu};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Linear, Fp8Tensor, Granularity, scaled_matmul};

use super::{
    device::{Random, compiles_for_long, devices, sqnr, values},
    linear::{
        linear,
        products::{Distribution, recipes},
    },
    matmul::product,
};

const DISTRIBUTIONS: [Distribution; 3] = [
    Distribution::Normal,
    Distribution::Uniform,
    Distribution::Outliers,
];

/// In `test_base.py`, a product of operands with a scale for each row or column has 25 dB, and one whose sizes had to be padded
/// has more than 50 beside an emulated one.
#[test]
fn products_are_within_torchaos_noise() {
    let shapes = [[5, 37, 11], [16, 32, 16], [64, 48, 1], [128, 256, 64]];
    let block = |rows, columns| Granularity::Block { rows, columns };
    for device in devices() {
        let mut random = Random::new(45);
        for [m, k, n] in shapes {
            for distribution in DISTRIBUTIONS {
                let x = distribution.matrix(&mut random, [m, k], &device);
                let y = distribution.matrix(&mut random, [k, n], &device);
                let sums = |x: &Tensor<2>, y: &Tensor<2>| -> Vec<f32> {
                    let sums = product(x, y).into_iter();
                    sums.map(|(sum, _)| sum as f32).collect()
                };
                let exact = sums(&x, &y);
                for [left, right] in [
                    [Granularity::Tensor, Granularity::Tensor],
                    [Granularity::Row, Granularity::Column],
                    [Granularity::Row, Granularity::Tensor],
                    [Granularity::Tensor, Granularity::Column],
                    [block(1, 16), block(16, 16)],
                ] {
                    let [a, b] = [(&x, left), (&y, right)].map(|(tensor, granularity)| {
                        let cast = Fp8Cast::new(granularity, Fp8Format::E4M3);
                        Fp8Tensor::quantize_as(tensor.clone(), cast).unwrap()
                    });
                    let [p, q] = [&a, &b].map(|side| side.dequantize(FloatDType::F32));
                    let emulated = sums(&p, &q);
                    let found = scaled_matmul(&a, &b, None, FloatDType::F32).unwrap();
                    let found = values(found);
                    let noise = [sqnr(&exact, &found), sqnr(&emulated, &found)];
                    assert!(
                        noise[0] >= 25.0 && noise[1] > 50.0,
                        "[{m}, {k}] by [{k}, {n}], {left:?} by {right:?}, {distribution:?}: {noise:?}"
                    );
                }
            }
        }
    }
}

/// Output, and gradients of the input and of the three weights, of Llama's feed-forward block.
fn feed_forward(
    layer: impl Fn(usize, Tensor<2>) -> Tensor<2>,
    weights: [Tensor<2>; 3],
    [input, gradient]: [&Tensor<2>; 2],
) -> Vec<Vec<f32>> {
    let input = input.clone().require_grad();
    let gated = silu(layer(0, input.clone())) * layer(1, input.clone());
    let output = layer(2, gated);
    let gradients = (output.clone() * gradient.clone()).sum().backward();
    let leaves = [input].into_iter().chain(weights);
    let gradients = leaves.map(|leaf| values(leaf.grad(&gradients).unwrap()));
    [values(output)].into_iter().chain(gradients).collect()
}

/// In `test_numerics_integration.py`, output and all gradients have more than 20 dB, of normally distributed numbers.
#[test]
fn a_feed_forward_block_is_within_torchaos_noise() {
    let devices = devices().into_iter();
    for device in devices.filter(|device| !compiles_for_long(device)) {
        let device = device.autodiff();
        let mut random = Random::new(46);
        let linears: [Linear; 3] = [[48, 96], [48, 96], [96, 48]]
            .map(|[d_input, d_output]| linear(&mut random, d_input, d_output, &device));
        let weights = || linears.each_ref().map(|linear| linear.weight.val());
        let x = random.matrix([64, 48], &device);
        let g = random.matrix([64, 48], &device) * 1e-5;
        let exact = feed_forward(|i, x| linears[i].forward(x), weights(), [&x, &g]);
        for recipe in recipes() {
            let layers = linears
                .each_ref()
                .map(|linear| Fp8Linear::from_linear(linear.clone(), recipe).unwrap());
            // Delayed scaling has its scales from the second step on.
            let pass = || feed_forward(|i, x| layers[i].forward(x), weights(), [&x, &g]);
            pass();
            let noise: Vec<_> = exact
                .iter()
                .zip(pass())
                .map(|(exact, actual)| sqnr(exact, &actual))
                .collect();
            assert!(
                noise.iter().all(|noise| *noise > 20.0),
                "{recipe:?}: {noise:?}"
            );
        }
    }
}
