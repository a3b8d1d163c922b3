//! The gradient of the weight in high precision.

use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fp8::Fp8Linear;
use burn_fp8::recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RowwiseScaling};

use super::super::device::{Random, devices, values};
use super::{assert_near, linear, pass, pass_fp8};

/// Recipes with the gradient in fp8, and in high precision.
fn recipes() -> [[Fp8Recipe; 2]; 3] {
    let (current, rows) = (CurrentScaling::new(), RowwiseScaling::new());
    let blocks = BlockScaling::new().with_size(16);
    [
        [
            current.into(),
            current.with_high_precision_weight_gradient(true).into(),
        ],
        [
            rows.into(),
            rows.with_high_precision_weight_gradient(true).into(),
        ],
        [
            blocks.into(),
            blocks.with_high_precision_weight_gradient(true).into(),
        ],
    ]
}

#[test]
fn a_recipe_says_whether_it_is() {
    for recipes in recipes() {
        assert_eq!(
            recipes.map(|recipe| recipe.high_precision_weight_gradient()),
            [false, true]
        );
        assert_eq!(
            recipes.map(|recipe| recipe.validate().is_ok()),
            [true, true]
        );
    }
    assert!(!Fp8Recipe::from(DelayedScaling::new()).high_precision_weight_gradient());
}

/// It is that of a layer in f32, and all else is as with the gradient in fp8.
#[test]
fn it_is_that_of_a_plain_layer() {
    for device in devices() {
        let device = device.autodiff();
        let mut random = Random::new(43);
        let linear = linear(&mut random, 32, 16, &device);
        let input = random.matrix([24, 32], &device);
        let gradient = random.matrix([24, 16], &device) * 1e-3;
        let bias = linear.bias.as_ref().unwrap().val();
        let parameters = (&linear.weight.val(), &bias);
        let plain = pass(|x| linear.forward(x), parameters, &input, &gradient);
        for recipes in recipes() {
            let [low, high] = recipes.map(|recipe| {
                let layer = Fp8Linear::from_linear(linear.clone(), recipe).unwrap();
                pass_fp8(&layer, &input, &gradient)
            });
            assert_eq!(
                [&high[0], &high[1], &high[3]],
                [&low[0], &low[1], &low[3]],
                "{recipes:?}"
            );
            assert_ne!(high[2], low[2], "{recipes:?}");
            // On some devices, the tuner picks another kernel for the product.
            let largest = plain[2].iter().fold(0f32, |most, x| most.max(x.abs()));
            for (high, plain) in high[2].iter().zip(&plain[2]) {
                assert!(
                    (high - plain).abs() <= 2e-3 * largest,
                    "{recipes:?}: {high}, {plain}"
                );
            }
        }
    }
}

/// On Flex, a product of 16-bit tensors is that of Burn, in the dtype of the input.
#[test]
fn it_is_in_the_dtype_of_the_input() {
    let device = Device::flex().autodiff();
    for dtype in [FloatDType::BF16, FloatDType::F16] {
        let mut random = Random::new(44);
        let linear = linear(&mut random, 32, 16, &device);
        let input = random.matrix([24, 32], &device).cast(dtype);
        let gradient = random.matrix([24, 16], &device).cast(dtype);
        let expected = input.clone().transpose().matmul(gradient.clone());
        let expected = values(expected.cast(FloatDType::F32));
        for [_, recipe] in recipes() {
            let layer = Fp8Linear::from_linear(linear.clone(), recipe).unwrap();
            let x = input.clone().require_grad();
            let output = layer.forward(x);
            let gradients = (output * gradient.clone()).sum().backward();
            let found = layer.weight.val().grad(&gradients).unwrap();
            assert_eq!(found.dtype(), DType::F32);
            assert_near(&values(found), &expected, 0.0);
        }
    }
}

/// Only what needs a gradient gets one.
#[test]
fn frozen_weights_get_none_and_first_layers_do() {
    for device in devices() {
        let device = device.autodiff();
        let mut random = Random::new(45);
        let linear = linear(&mut random, 32, 16, &device);
        for [low, high] in recipes() {
            let [low, high] = [low, high].map(|recipe| {
                let layer = Fp8Linear::from_linear(linear.clone(), recipe)
                    .unwrap()
                    .no_grad();
                let x = random_input(&device).require_grad();
                let gradients = layer.forward(x.clone()).sum().backward();
                assert!(layer.weight.val().grad(&gradients).is_none());
                values(x.grad(&gradients).unwrap())
            });
            assert_eq!(high, low);
        }
        for [_, recipe] in recipes() {
            let layer = Fp8Linear::from_linear(linear.clone(), recipe).unwrap();
            let input = random_input(&device);
            let gradients = layer.forward(input.clone()).sum().backward();
            let found = values(layer.weight.val().grad(&gradients).unwrap());
            let ones = Tensor::ones([24, 16], &device);
            let expected = values(input.transpose().matmul(ones));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() < 0.05,
                    "{recipe:?}: {found}, {expected}"
                );
            }
        }
    }
}

fn random_input(device: &Device) -> Tensor<2> {
    Random::new(46).matrix([24, 32], device)
}
