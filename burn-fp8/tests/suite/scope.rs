//! Scopes: fp8 off, calibration, micro-batches.

use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_fp8::recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RowwiseScaling};
use burn_fp8::{Fp8Linear, Fp8LinearConfig, Fp8Scope, Microbatch, calibrate, fp8_autocast};

use super::device::{Random, devices, sqnr, values};

fn layer(device: &Device) -> Fp8Linear {
    let recipe = DelayedScaling::new().with_amax_history_len(4).into();
    Fp8LinearConfig::new(6, 3).with_recipe(recipe).init(device)
}

#[test]
fn scopes_nest_and_end() {
    let outermost = Fp8Scope::current();
    let inner = outermost.with_microbatch(Microbatch::Later);
    inner.run(|| {
        assert_eq!(Fp8Scope::current(), inner);
        fp8_autocast(false, None, || {
            assert_eq!(Fp8Scope::current(), inner.with_enabled(false));
            fp8_autocast(true, None, || assert_eq!(Fp8Scope::current(), inner));
            let recipe = CurrentScaling::new();
            let current = inner.with_recipe(recipe).unwrap();
            fp8_autocast(true, recipe, || {
                assert_eq!(Fp8Scope::current(), current);
                assert_eq!(Fp8Scope::current().recipe(), Some(recipe.into()));
                fp8_autocast(true, None, || assert_eq!(Fp8Scope::current(), inner));
            });
        });
        calibrate(|| {
            let expected = inner.with_enabled(false).with_calibration(true);
            assert_eq!(Fp8Scope::current(), expected);
        });
    });
    assert!(std::panic::catch_unwind(|| inner.run(|| panic!("on purpose"))).is_err());
    assert_eq!(Fp8Scope::current(), outermost);
    std::thread::spawn(move || assert_eq!(Fp8Scope::current(), outermost))
        .join()
        .unwrap();
}

#[test]
fn without_fp8_a_layer_is_a_linear() {
    for device in devices() {
        let layer = layer(&device);
        let x = Random::new(50).matrix([5, 6], &device);
        let off = values(fp8_autocast(false, None, || layer.forward(x.clone())));
        let on = values(layer.forward(x.clone()));
        assert_eq!(off, values(layer.into_linear().forward(x)));
        assert_ne!(off, on);
    }
}

#[test]
fn calibration_sets_the_scales() {
    for device in devices() {
        let layer = layer(&device);
        let mut random = Random::new(51);
        let weight = values(layer.weight.val())
            .iter()
            .fold(0f32, |max, x| max.max(x.abs()));
        let mut largest = 0f32;
        let mut last = Tensor::zeros([4, 6], &device);
        for _ in 0..3 {
            last = random.matrix([4, 6], &device) * 30.0;
            largest = values(last.clone())
                .iter()
                .fold(largest, |max, x| max.max(x.abs()));
            let exact = calibrate(|| layer.forward(last.clone()));
            let plain = layer.clone().into_linear().forward(last.clone());
            assert_eq!(values(exact), values(plain));
        }
        let [input, cast, gradient] = layer.scaling_state().unwrap();
        assert_eq!((input.scale, cast.scale), (448.0 / largest, 448.0 / weight));
        assert_eq!((gradient.scale, gradient.history), (1.0, vec![0.0; 4]));
        let exact = values(layer.clone().into_linear().forward(last.clone()));
        assert!(sqnr(&exact, &values(layer.forward(last))) > 20.0);
    }
}

#[test]
fn later_microbatches_use_the_weight_of_the_first() {
    for device in devices() {
        let device = device.autodiff();
        let mut layer = layer(&device);
        let mut random = Random::new(52);
        let mut pass = |layer: &Fp8Linear, microbatch| {
            let x = random.matrix([4, 6], &device);
            let scope = Fp8Scope::current().with_microbatch(microbatch);
            let loss = scope.run(|| layer.forward(x)).powf_scalar(2.0).mean();
            let gradients = GradientsParams::from_grads(loss.backward(), layer);
            let state = layer.scaling_state().unwrap();
            (gradients, state.map(|tensor| (tensor.history, tensor.amax)))
        };
        for step in 0..3 {
            let (_, [input, weight, _]) = pass(&layer, Microbatch::First);
            assert!(weight.1 > 0.0, "the first pass casts the weight");
            let (_, [input_2, weight_2, _]) = pass(&layer, Microbatch::Later);
            let (gradients, [_, weight_3, _]) = pass(&layer, Microbatch::Later);
            assert_ne!(input.0, input_2.0);
            assert_eq!(weight_2.1, 0.0, "a later pass does not");
            assert_eq!(weight_3, weight_2);
            assert_eq!(*weight_3.0.last().unwrap(), weight.1, "step {step}");
            layer = SgdConfig::new().init().step(0.1, layer, gradients);
        }
        // An optimizer step ends that, because it changes the weight.
        let (_, [_, weight, _]) = pass(&layer, Microbatch::Later);
        let amax = values(layer.weight.val())
            .iter()
            .fold(0f32, |max, x| max.max(x.abs()));
        assert_eq!(weight.1, amax);
    }
}

fn recipes() -> [Fp8Recipe; 4] {
    [
        DelayedScaling::new().with_amax_history_len(4).into(),
        CurrentScaling::new().into(),
        RowwiseScaling::new().into(),
        BlockScaling::new().with_size(4).into(),
    ]
}

fn in_microbatch(microbatch: Microbatch, layer: &Fp8Linear, x: &Tensor<2>) -> Vec<f32> {
    let scope = Fp8Scope::current().with_microbatch(microbatch);
    values(scope.run(|| layer.forward(x.clone())))
}

/// Even if the first micro-batch has no rows, or runs without fp8: a weight that was changed by hand keeps its id.
#[test]
fn every_first_micro_batch_forgets_the_old_weight() {
    let device = Device::flex();
    let x = Random::new(55).matrix([4, 6], &device);
    let nothing = Tensor::<2>::zeros([0, 6], &device);
    for recipe in recipes() {
        for first in [&x, &nothing] {
            let mut layer = Fp8LinearConfig::new(6, 3).with_recipe(recipe).init(&device);
            in_microbatch(Microbatch::First, &layer, &x);
            layer.weight = layer.weight.map(|weight| weight * -3.0);
            // With rows it runs in high precision.
            let enabled = first.dims()[0] == 0;
            fp8_autocast(enabled, recipe, || {
                in_microbatch(Microbatch::First, &layer, first)
            });
            let [later, expected] = [Microbatch::Later, Microbatch::Only]
                .map(|microbatch| in_microbatch(microbatch, &layer, &x));
            assert_eq!(later, expected, "{recipe:?}");
        }
    }
}

/// A later micro-batch uses the weight of the first only if it is the same parameter, cast by the same recipe.
#[test]
fn another_weight_or_recipe_is_cast_anew() {
    let device = Device::flex();
    let x = Random::new(54).matrix([4, 6], &device);
    for recipe in recipes() {
        let config = Fp8LinearConfig::new(6, 3).with_recipe(recipe);
        let (mut layer, other) = (config.init(&device), config.init(&device));
        in_microbatch(Microbatch::First, &layer, &x);
        layer.weight = other.weight.clone();
        layer.bias = other.bias.clone();
        let later = in_microbatch(Microbatch::Later, &layer, &x);
        assert_eq!(later, values(other.forward(x.clone())), "{recipe:?}");
    }
    for first in recipes() {
        for later in recipes() {
            let layer = layer(&device);
            fp8_autocast(true, first, || in_microbatch(Microbatch::First, &layer, &x));
            let [found, expected] = [Microbatch::Later, Microbatch::Only].map(|microbatch| {
                fp8_autocast(true, later, || in_microbatch(microbatch, &layer, &x))
            });
            assert_eq!(found, expected, "{later:?} after {first:?}");
        }
    }
}
