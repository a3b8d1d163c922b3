//! The scales of passes that do not train.

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fp8::recipe::DelayedScaling;
use burn_fp8::{Fp8Format, Fp8Linear, Fp8LinearConfig, Fp8Tensor, scaled_matmul};

use super::super::device::{Random, devices, values};
use super::{linear, pass_fp8};

fn largest(tensor: &Tensor<2>) -> f32 {
    let values = values(tensor.clone());
    values.iter().fold(0f32, |max, value| max.max(value.abs()))
}

/// The output of a layer that casts with these scales.
fn product(
    layer: &Fp8Linear,
    input: &Tensor<2>,
    [input_scale, weight_scale]: [f32; 2],
) -> Vec<f32> {
    let format = Fp8Format::E4M3;
    let weight = layer.weight.val().without_autodiff();
    let bias = layer.bias.as_ref().unwrap().val().without_autodiff();
    let input = Fp8Tensor::quantize_with_scale(input.clone(), input_scale, format).unwrap();
    let weight = Fp8Tensor::quantize_with_scale(weight, weight_scale, format).unwrap();
    values(scaled_matmul(&input, &weight, Some(bias), FloatDType::F32).unwrap())
}

/// In Transformer Engine the scales change when a training pass ends, and an evaluation after it uses them.
#[test]
fn an_evaluation_runs_with_the_scales_of_the_last_step() {
    for device in devices() {
        let training = device.clone().autodiff();
        let mut random = Random::new(51);
        let recipe = DelayedScaling::new().with_amax_history_len(4);
        let layer = Fp8Linear::from_linear(linear(&mut random, 6, 3, &training), recipe).unwrap();
        let [x, g] = [[5, 6], [5, 3]].map(|shape| random.matrix(shape, &training));
        // With a scale of 1, these are mostly below the smallest code.
        let x = x * 1e-3;
        pass_fp8(&layer, &x, &g);

        let y = random.matrix([4, 6], &device) * 1e-3;
        let scales = [&x, &layer.weight.val()].map(|tensor| 448.0 / largest(tensor));
        let expected = product(&layer, &y, scales);
        let before = layer.scaling_state();
        let valid = layer.valid();
        for _ in 0..2 {
            assert_eq!(values(valid.forward(y.clone())), expected);
        }
        assert_eq!(valid.scaling_state(), before);
        let config = Fp8LinearConfig::new(6, 3).with_recipe(recipe.into());
        let loaded = config.init(&device).load_record(layer.into_record());
        assert_eq!(values(loaded.forward(y)), expected);
        assert_eq!(loaded.scaling_state(), before);
    }
}

/// As for a loss that looks through a frozen network. Its gradients may be of any size, and are not those of the training.
#[test]
fn a_gradient_through_an_evaluation_is_scaled_by_itself() {
    for device in devices() {
        let training = device.clone().autodiff();
        let mut random = Random::new(52);
        let recipe = DelayedScaling::new().with_amax_history_len(4);
        let config = linear(&mut random, 6, 3, &training);
        let layer = Fp8Linear::from_linear(config, recipe).unwrap();
        let fresh = layer.clone().valid();
        let [x, g] = [[5, 6], [5, 3]].map(|shape| random.matrix(shape, &training));
        pass_fp8(&layer, &x, &g);
        let trained = layer.valid();
        for (layer, is_trained) in [(fresh, false), (trained, true)] {
            let before = layer.scaling_state();
            for size in [1e-12, 1.0, f32::INFINITY, 1e12] {
                let x = random.matrix([4, 6], &training).require_grad();
                let g = random.matrix([4, 3], &training) * size;
                let output = layer.forward(x.clone());
                let gradients = (output * g.clone()).sum().backward();
                let actual = values(x.grad(&gradients).unwrap());
                if size.is_infinite() {
                    // It must leave nothing behind.
                    continue;
                }
                let (weight, format) = (layer.weight.val(), Fp8Format::E4M3);
                let weight = match is_trained {
                    true => Fp8Tensor::quantize(weight, format),
                    // By 1.
                    false => Fp8Tensor::quantize_with_scale(weight, 1.0, format).unwrap(),
                };
                let gradient = Fp8Tensor::quantize(g.without_autodiff(), Fp8Format::E5M2);
                let expected =
                    scaled_matmul(&gradient, &weight.transpose(), None, FloatDType::F32).unwrap();
                assert_eq!(actual, values(expected), "{size}");
            }
            assert_eq!(layer.scaling_state(), before);
        }
    }
}

/// A shorter history loses amaxes, and the scales that were computed from them are forgotten too.
#[test]
fn an_evaluation_follows_a_history_that_was_cut() {
    let device = Device::flex().autodiff();
    let mut random = Random::new(53);
    let [short, long] = [2, 4].map(|length| DelayedScaling::new().with_amax_history_len(length));
    let layer = Fp8Linear::from_linear(linear(&mut random, 6, 3, &device), long).unwrap();
    for size in [8.0, 1.0, 1.0] {
        let [x, g] = [[5, 6], [5, 3]].map(|shape| random.matrix(shape, &device) * size);
        pass_fp8(&layer, &x, &g);
    }
    let y = random.matrix([4, 6], &device).without_autodiff();
    let evaluated = |before: bool| {
        let layer = layer.clone().valid();
        let whole = before.then(|| values(layer.forward(y.clone())));
        let layer = layer.with_recipe(short).unwrap();
        layer.forward(y.clone());
        let layer = layer.with_recipe(long).unwrap();
        (whole, values(layer.forward(y.clone())))
    };
    let (whole, cut) = evaluated(true);
    assert_ne!(whole.as_ref(), Some(&cut));
    assert_eq!(cut, evaluated(false).1);
}
