//! The gradient of the bias.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_fp8::Fp8Linear;

use super::super::device::{Random, values};
use super::linear;

/// The gradient of a 16-bit bias is 16-bit too, but the terms of its sum are not.
#[test]
fn the_gradient_of_a_bias_is_summed_before_it_is_rounded() {
    let device = Device::flex().autodiff();
    let mut linear = linear(&mut Random::new(71), 4, 2, &device);
    linear.bias = linear
        .bias
        .map(|bias| bias.map(|bias| bias.cast(FloatDType::BF16).detach().require_grad()));
    let layer = Fp8Linear::from(linear);
    // Less than half of bf16's step above 1, but three times as much is more than half of the step above 2.
    let term = 1.0 + 1.0 / 256.0 - 1.0 / 4096.0;
    let output = layer.forward(Tensor::<2>::ones([3, 4], &device));
    let gradients = (output * term).sum().backward();
    let gradient = layer.bias.unwrap().val().grad(&gradients).unwrap();
    let expected = half::bf16::from_f32(3.0 * term).to_f32();
    assert_eq!(expected, 3.015625);
    assert_eq!(values(gradient), [expected; 2]);
}
