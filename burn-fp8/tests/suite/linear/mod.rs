//! `Fp8Linear`: helpers that its tests share.

mod bias;
mod convert;
mod dtypes;
mod evaluation;
mod fallback;
mod mappers;
pub(super) mod products;
mod ranks;
mod state;
mod weight_gradient;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_fp8::Fp8Linear;

use super::device::{Random, values};

#[track_caller]
pub(crate) fn assert_near(actual: &[f32], expected: &[f32], relative: f32) {
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(expected) {
        assert!(
            (actual - expected).abs() <= relative * expected.abs(),
            "{actual} is not {expected}"
        );
    }
}

/// A linear layer with parameters from the test's own generator.
pub(in crate::suite) fn linear(
    random: &mut Random,
    d_input: usize,
    d_output: usize,
    device: &Device,
) -> Linear {
    let mut linear = LinearConfig::new(d_input, d_output).init(device);
    let weight = random.matrix([d_input, d_output], device) / (d_input as f32).sqrt();
    linear.weight = linear
        .weight
        .map(|_| weight.set_require_grad(device.is_autodiff()));
    let bias = random.matrix([1, d_output], device).reshape([d_output]);
    linear.bias = linear
        .bias
        .map(|param| param.map(|_| bias.set_require_grad(device.is_autodiff())));
    linear
}

/// Output, input gradient, weight gradient, bias gradient.
pub(in crate::suite) type Pass = [Vec<f32>; 4];

pub(super) fn pass(
    forward: impl Fn(Tensor<2>) -> Tensor<2>,
    layer: (&Tensor<2>, &Tensor<1>),
    input: &Tensor<2>,
    gradient: &Tensor<2>,
) -> Pass {
    let input = input.clone().require_grad();
    let output = forward(input.clone());
    let gradients = (output.clone() * gradient.clone()).sum().backward();
    [
        values(output),
        values(input.grad(&gradients).unwrap()),
        values(layer.0.grad(&gradients).unwrap()),
        values(layer.1.grad(&gradients).unwrap()),
    ]
}

pub(in crate::suite) fn pass_fp8(
    layer: &Fp8Linear,
    input: &Tensor<2>,
    gradient: &Tensor<2>,
) -> Pass {
    let bias = layer.bias.as_ref().unwrap().val();
    pass(
        |x| layer.forward(x),
        (&layer.weight.val(), &bias),
        input,
        gradient,
    )
}
