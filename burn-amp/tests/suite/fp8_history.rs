//! Delayed scaling: which amaxes enter the history of which layer, and when.

use burn::{
    nn::Linear,
    optim::{
        AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams,
        LambConfig, LionConfig, ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
        decay::WeightDecayConfig, momentum::MomentumConfig,
    },
    tensor::{Device, FloatDType, Tensor},
};
use burn_amp::{
    Autocast, AutocastLease, Fp8State,
    recipe::{AmaxReducer, DelayedScaling},
};
use burn_fp8::{Fp8Format, Fp8Tensor, amax, scaled_matmul};
use std::{
    error::Error,
    sync::{Arc, Mutex},
};

use super::fp8::{linear, noise, values, wave};

fn largest(tensor: &Tensor<2>) -> f32 {
    values(amax(tensor.clone()))[0]
}

fn cast(tensor: &Tensor<2>, scale: f32, format: Fp8Format) -> Fp8Tensor<2> {
    Fp8Tensor::quantize_with_scale(tensor.clone(), scale, format).unwrap()
}

fn multiply(a: &Fp8Tensor<2>, b: &Fp8Tensor<2>, dtype: FloatDType) -> Vec<f32> {
    let product = scaled_matmul(a, b, None, dtype).unwrap();
    values(product.cast(FloatDType::F32))
}

/// By its own amax.
fn own(tensor: &Tensor<2>, format: Fp8Format) -> Fp8Tensor<2> {
    cast(tensor, format.max() / largest(tensor), format)
}

fn lease(recipe: DelayedScaling) -> (AutocastLease, Device) {
    let lease = Autocast::fp8(recipe).unwrap().lease(Device::flex());
    let lease = lease.unwrap();
    let device = lease.device().autodiff();
    (lease, device)
}

fn layer(device: &Device) -> Linear {
    let mut layer = linear([16, 16], device);
    layer.bias = None;
    layer
}

fn on(device: &Device, tensor: &Tensor<2>) -> Tensor<2> {
    Tensor::from_data(tensor.clone().into_data(), device)
}

/// The scales of a step come from the amaxes of the steps before, in e4m3 and e5m2; those of the first from its own. The
/// history goes with the weight, whatever optimizer makes the next one of it.
#[test]
fn a_layer_has_a_history() {
    let decay = || Some(WeightDecayConfig::new(1e-2));
    let sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    // All that Burn has but L-BFGS, whose parameters are slices of one vector.
    let optimizers: [ModuleOptimizer; 14] = [
        SgdConfig::new().init(),
        sgd.with_weight_decay(decay()).init(),
        AdamConfig::new().with_weight_decay(decay()).init(),
        AdamConfig::new().with_amsgrad(true).init(),
        AdamWConfig::new().init(),
        AdamWConfig::new().with_cautious_weight_decay(true).init(),
        AdaGradConfig::new().with_weight_decay(decay()).init(),
        RmsPropConfig::new().with_centered(true).init(),
        AdanConfig::new().with_weight_decay(1e-2).init(),
        AdanConfig::new()
            .with_weight_decay(1e-2)
            .with_no_prox(true)
            .init(),
        LambConfig::new().init(),
        LionConfig::new().with_weight_decay(1e-2).init(),
        MuonConfig::new().with_weight_decay(decay()).init(),
        AdafactorConfig::new().init(),
    ];
    for (number, mut optimizer) in optimizers.into_iter().enumerate() {
        let recipe = DelayedScaling::new().with_amax_history_len(2);
        let (_lease, device) = lease(recipe);
        let plain = Device::flex();
        let mut layer = layer(&device);
        // Of input, weight and gradient, step by step.
        let mut amaxes: Vec<[f32; 3]> = Vec::new();
        for size in [3.0, 50.0, 0.1, 7.0] {
            let x = wave([6, 16], 0.2, &plain) * size;
            let gradient = wave([6, 16], 0.9, &plain) * (size * 1e-4);
            let weight = on(&plain, &layer.weight.val());
            let input = on(&device, &x).require_grad();
            let output = layer.forward(input.clone());
            let gradients = (output.clone() * on(&device, &gradient)).sum().backward();
            let found = [
                values(output),
                values(input.grad(&gradients).unwrap()),
                values(layer.weight.grad(&gradients).unwrap()),
            ];
            let gradients = GradientsParams::from_grads(gradients, &layer);
            layer = optimizer.step(1e-2, layer, gradients);

            let own = [&x, &weight, &gradient].map(largest);
            // The history has two slots.
            let window = match &amaxes[..] {
                [] => vec![own],
                before => before.iter().rev().take(2).copied().collect(),
            };
            let scale = |tensor: usize| {
                let largest = window.iter().map(|step| step[tensor]).fold(0.0, f32::max);
                [448.0, 448.0, 57344.0][tensor] / largest
            };
            amaxes.push(own);
            let xq = cast(&x, scale(0), Fp8Format::E4M3);
            let wq = cast(&weight, scale(1), Fp8Format::E4M3);
            let gq = cast(&gradient, scale(2), Fp8Format::E5M2);
            let expected = [
                multiply(&xq, &wq, FloatDType::BF16),
                multiply(&gq, &wq.clone().transpose(), FloatDType::F32),
                multiply(&xq.clone().transpose(), &gq, FloatDType::F32),
            ];
            for (product, bound) in [1e-6, 1e-10, 1e-10].into_iter().enumerate() {
                let noise = noise(&found[product], &expected[product]);
                assert!(
                    noise < bound,
                    "optimizer {number}, product {product} after {amaxes:?}: {noise}"
                );
            }
        }
    }
}

/// The scales of a saved state: of input, weight and gradient.
fn scales(state: &Fp8State) -> [f32; 3] {
    let state = serde_json::to_value(state).unwrap();
    let tensors = state["layers"][0]["tensors"].as_array().unwrap().clone();
    ["Input", "Weight", "Gradient"].map(|role| {
        let tensor = tensors.iter().find(|tensor| tensor["role"] == role);
        f32::from_bits(tensor.unwrap()["scale"].as_u64().unwrap() as u32)
    })
}

/// Between two changes of the scales there are as many steps as the recipe says, of those whose amax is not 0: a gradient that is
/// nothing at first, as before a layer that begins with zeros, does not keep the scale for the whole interval.
#[test]
fn a_step_of_zeros_is_not_counted() {
    let (lease, device) = lease(DelayedScaling::new().with_interval(3));
    let layer = layer(&device);
    let plain = Device::flex();
    let unit = wave([6, 16], 0.9, &plain);
    let mut found = Vec::new();
    for size in [0.0, 1e-3, 1.0, 0.0, 2.0, 3.0, 4.0] {
        let x = on(&device, &wave([6, 16], 0.2, &plain));
        let gradient = on(&device, &(unit.clone() * size));
        let loss = (layer.forward(x) * gradient).sum();
        let gradients = loss.backward();
        values(layer.weight.grad(&gradients).unwrap());
        found.push(scales(&lease.fp8_state().unwrap())[2]);
    }
    let by = |size: f32| Fp8Format::E5M2.max() / largest(&(unit.clone() * size));
    // 1e-3, 1 and 2 are three steps; 3 is the next to change it.
    assert_eq!(
        found,
        [
            1.0,
            by(1e-3),
            by(1e-3),
            by(1e-3),
            by(1e-3),
            by(3.0),
            by(3.0)
        ]
    );
}

/// Before its first backward, as in a program that only evaluates, each tensor is cast by its own amax.
#[test]
fn a_layer_that_never_trained_goes_by_each_amax() {
    let (lease, _) = lease(DelayedScaling::new());
    let plain = Device::flex();
    let layer = layer(&lease.device());
    let weight = own(&on(&plain, &layer.weight.val()), Fp8Format::E4M3);
    for size in [1.0, 1e4, 1e-4] {
        let x = wave([6, 16], 0.2, &plain) * size;
        let found = values(layer.forward(on(&lease.device(), &x)));
        let expected = multiply(&own(&x, Fp8Format::E4M3), &weight, FloatDType::BF16);
        let noise = noise(&found, &expected);
        assert!(noise < 1e-6, "{size}: {noise}");
    }
}

/// Two layers of one size on one input that is not trained: no other product tells which of them a gradient is of.
#[test]
fn heads_of_one_frozen_feature_do_not_share_a_scale() {
    let (_lease, device) = lease(DelayedScaling::new());
    let plain = Device::flex();
    let heads = [layer(&device), layer(&device)];
    let x = wave([6, 16], 0.2, &plain);
    let feature = on(&device, &x);
    for step in 0..3 {
        let gradients = [1.0, 1e-7].map(|size| wave([6, 16], 0.9 + step as f32, &plain) * size);
        let losses = [0, 1].map(|head| {
            let output = heads[head].forward(feature.clone());
            (output * on(&device, &gradients[head])).sum()
        });
        let [first, second] = losses;
        let found = (first + second).backward();
        for (head, gradient) in heads.iter().zip(&gradients) {
            let found = values(head.weight.grad(&found).unwrap());
            let input = own(&x, Fp8Format::E4M3).transpose();
            let expected = multiply(&input, &own(gradient, Fp8Format::E5M2), FloatDType::F32);
            let noise = noise(&found, &expected);
            assert!(noise < 1e-10, "step {step}: {noise}");
        }
    }
}

/// What is added has one gradient. That the one layer has seen it does not keep the other, whose input is not trained,
/// from its history.
#[test]
fn layers_that_are_added_have_a_history_each() {
    let plain = Device::flex();
    // Backward may come to either first.
    for inner_first in [true, false] {
        let (lease, device) = lease(DelayedScaling::new().with_amax_history_len(4));
        let [inner, data] = [layer(&device), layer(&device)];
        let mut expected: Vec<Vec<f32>> = vec![Vec::new(); 2];
        for size in [2.0, 8.0, 0.5] {
            let [h, x] = [0.2, 0.3].map(|at| wave([6, 16], at, &plain) * size);
            let trained = on(&device, &h).require_grad();
            let output = if inner_first {
                inner.forward(trained) + data.forward(on(&device, &x))
            } else {
                data.forward(on(&device, &x)) + inner.forward(trained)
            };
            let found = output.sum().backward();
            for layer in [&inner, &data] {
                values(layer.weight.grad(&found).unwrap());
            }
            for (seen, input) in expected.iter_mut().zip([&h, &x]) {
                seen.push(largest(input));
            }
            let state = lease.fp8_state().unwrap();
            let mut histories = histories(&state, "Input");
            let mut expected = expected.clone();
            for found in [&mut histories, &mut expected] {
                found.sort_by(|a, b| a.partial_cmp(b).unwrap());
            }
            assert_eq!(histories, expected);
        }
    }
}

/// An input that outlives a model knows nothing of it any more.
#[test]
fn histories_go_with_their_model() {
    let (lease, device) = lease(DelayedScaling::new());
    let plain = Device::flex();
    let x = wave([6, 16], 0.2, &plain);
    let feature = on(&device, &x);
    for size in [1.0, 1e-7] {
        let model = layer(&device);
        for step in 0..2 {
            let gradient = wave([6, 16], 0.9 + step as f32, &plain) * size;
            let loss = (model.forward(feature.clone()) * on(&device, &gradient)).sum();
            let found = values(model.weight.grad(&loss.backward()).unwrap());
            if step == 0 {
                let input = own(&x, Fp8Format::E4M3).transpose();
                let expected = multiply(&input, &own(&gradient, Fp8Format::E5M2), FloatDType::F32);
                let noise = noise(&found, &expected);
                assert!(noise < 1e-10, "{size}: {noise}");
            }
        }
        assert_eq!(lease.fp8_state().unwrap().layers(), 1);
        drop(model);
        assert_eq!(lease.fp8_state().unwrap().layers(), 0);
    }
}

/// A rank by itself, which writes down what it is asked.
#[derive(Debug, Default)]
struct Heard(Mutex<Vec<Vec<f32>>>);

impl AmaxReducer for Heard {
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
        self.0.lock().unwrap().push(values(amaxes.clone()));
        Ok(amaxes)
    }
}

/// The largest amax of all passes of a step, and NaN if one is; not that of an evaluation in between.
#[test]
fn a_layer_that_runs_twice_shares_the_larger_amax() {
    for (sizes, expected) in [([50.0, 1.0], 50.0), ([f32::NAN, 1.0], f32::NAN)] {
        let heard = Arc::new(Heard::default());
        let autocast = Autocast::fp8(DelayedScaling::new()).unwrap();
        let lease = autocast.amax_reducer(heard.clone()).lease(Device::flex());
        let lease = lease.unwrap();
        let device = lease.device().autodiff();
        let (layer, plain) = (layer(&device), Device::flex());
        let unit = wave([6, 16], 0.2, &plain);
        let [first, second] = sizes.map(|size| layer.forward(on(&device, &(unit.clone() * size))));
        let evaluated = on(&lease.device(), &(unit.clone() * 1e4));
        burn::module::Module::valid(&layer)
            .forward(evaluated)
            .into_data();
        let weight = largest(&on(&plain, &layer.weight.val()));
        let gradients = (first + second).sum().backward();
        values(layer.weight.grad(&gradients).unwrap());
        let heard = heard.0.lock().unwrap()[0].clone();
        let expected = [largest(&unit) * expected, weight, 1.0];
        let bits = |amaxes: &[f32]| {
            amaxes
                .iter()
                .map(|x| x.is_nan().then_some(()).ok_or(*x))
                .collect::<Vec<_>>()
        };
        assert_eq!(bits(&heard), bits(&expected));
    }
}

/// The amaxes that each layer has of a tensor, the newest last.
fn histories(state: &Fp8State, role: &str) -> Vec<Vec<f32>> {
    let state = serde_json::to_value(state).unwrap();
    let history = |layer: &serde_json::Value| {
        let tensors = layer["tensors"].as_array().unwrap();
        let of_role = tensors.iter().find(|it| it["role"] == role).unwrap();
        let bits = of_role["amaxes"].as_array().unwrap().iter();
        let amaxes = bits.map(|it| f32::from_bits(it.as_u64().unwrap() as u32));
        // The slots that are filled.
        amaxes.filter(|amax| *amax > 0.0).collect()
    };
    state["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(history)
        .collect()
}

/// As in Transformer Engine, a step is one entry of each history, however often the layer ran, and all gradients of a step have one
/// scale.
#[test]
fn a_layer_that_runs_twice_has_one_gradient_a_step() {
    let (lease, device) = lease(DelayedScaling::new().with_amax_history_len(8));
    let layer = layer(&device);
    let input = wave([6, 16], 0.2, &Device::flex());
    let mut expected = Vec::new();
    for gradients in [[1.0f32, 3.0], [5.0, 2.0], [0.5, 0.25]] {
        let unit = on(&device, &input);
        let [first, second] = gradients.map(|it| layer.forward(unit.clone()) * it);
        let backward = (first + second).sum().backward();
        values(layer.weight.grad(&backward).unwrap());
        expected.push(gradients[0].max(gradients[1]));

        let state = lease.fp8_state().unwrap();
        assert_eq!(histories(&state, "Gradient"), [expected.clone()]);
        assert_eq!(histories(&state, "Input")[0].len(), expected.len());
    }
    // The scale of the next step, and of both its gradients.
    let unit = on(&device, &input);
    let [first, second] = [4.0, 0.1].map(|it| layer.forward(unit.clone()) * it);
    let backward = (first + second).sum().backward();
    let scale = Fp8Format::E5M2.max() / 5.0;
    let plain = Device::flex();
    let (input, ones) = (
        own(&input, Fp8Format::E4M3),
        Tensor::<2>::ones([6, 16], &plain),
    );
    let product = |size: f32| {
        let gradient = cast(&(ones.clone() * size), scale, Fp8Format::E5M2);
        multiply(&input.clone().transpose(), &gradient, FloatDType::BF16)
    };
    let sums = product(4.0).into_iter().zip(product(0.1));
    let sums: Vec<f32> = sums.map(|(first, second)| first + second).collect();
    let found = values(layer.weight.grad(&backward).unwrap());
    for (found, expected) in found.iter().zip(sums) {
        assert!(
            (found - expected).abs() <= expected.abs() / 128.0,
            "{found} {expected}"
        );
    }
}
