//! The state of delayed scaling: how it changes, and that records keep it.

use burn::module::{Module, ModuleMapper};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_fp8::recipe::{DelayedScaling, RecipeFormat};
use burn_fp8::{Fp8Linear, Fp8LinearConfig, ScalingState};

use super::super::device::{Random, compiles_for_long, devices, values};
use super::{linear, pass_fp8};

#[test]
fn state_follows_the_steps() {
    for device in devices() {
        let device = device.autodiff();
        let mut random = Random::new(23);
        let recipe = DelayedScaling::new().with_amax_history_len(3);
        let linear = linear(&mut random, 5, 4, &device);
        let weight_amax = values(linear.weight.val())
            .iter()
            .fold(0f32, |max, w| max.max(w.abs()));
        let layer = Fp8Linear::from_linear(linear, recipe).unwrap();
        let mut inputs = vec![];
        let mut gradients = vec![];
        for _ in 0..5 {
            let (x, g) = (
                random.matrix([3, 5], &device),
                random.matrix([3, 4], &device),
            );
            let amax = |t: &Tensor<2>| {
                values(t.clone())
                    .iter()
                    .fold(0f32, |max, x| max.max(x.abs()))
            };
            inputs.push(amax(&x));
            gradients.push(amax(&g));
            pass_fp8(&layer, &x, &g);
        }
        let [input, weight, gradient] = layer.scaling_state().unwrap();
        // After four steps, the history holds two amaxes beside its free slot, and the fifth waits.
        let expected = |seen: &[f32], max: f32| ScalingState {
            history: vec![0.0, seen[2], seen[3]],
            scale: max / seen[1..4].iter().copied().fold(0.0, f32::max),
            amax: seen[4],
        };
        assert_eq!(input, expected(&inputs, 448.0));
        assert_eq!(weight, expected(&[weight_amax; 5], 448.0));
        assert_eq!(gradient, expected(&gradients, 57344.0));
    }
}

/// Of several backward passes, the largest amax of a gradient counts, even if the state is read or mapped between them.
#[test]
fn looking_between_backward_passes_loses_no_amax() {
    struct Nothing;

    impl ModuleMapper for Nothing {}

    for device in devices() {
        let device = device.autodiff();
        let mut random = Random::new(27);
        let recipe = DelayedScaling::new().with_amax_history_len(3);
        let linear = linear(&mut random, 4, 4, &device);
        let x = random.matrix([2, 4], &device);
        for looks in 0..3 {
            let mut layer = Fp8Linear::from_linear(linear.clone(), recipe).unwrap();
            let outputs = [(); 2].map(|()| layer.forward(x.clone()));
            for (output, gradient) in outputs.into_iter().zip([8.0, 0.5]) {
                (output * gradient).sum().backward();
                match looks {
                    0 => {}
                    1 => assert_eq!(layer.scaling_state().unwrap()[2].amax, 8.0),
                    _ => layer = layer.map(&mut Nothing),
                }
            }
            layer.forward(x.clone());
            let [.., gradient] = layer.scaling_state().unwrap();
            assert_eq!(
                (gradient.history, gradient.scale),
                (vec![0.0, 0.0, 8.0], 57344.0 / 8.0)
            );
        }
    }
}

#[test]
fn a_resumed_run_continues_bit_for_bit() {
    for device in devices() {
        // Where every pass is compiled anew, the interval that needs counting is enough.
        let intervals = if compiles_for_long(&device) {
            2..3
        } else {
            1..3
        };
        let device = device.autodiff();
        for interval in intervals {
            let recipe = DelayedScaling::new()
                .with_amax_history_len(3)
                .with_interval(interval);
            let mut random = Random::new(26);
            let start = Fp8Linear::from_linear(linear(&mut random, 6, 3, &device), recipe).unwrap();
            let batches: Vec<_> = (0..6).map(|_| random.matrix([4, 6], &device)).collect();
            let step = |layer: Fp8Linear, batch: &Tensor<2>| {
                let mut optim = SgdConfig::new().init();
                let loss = layer.forward(batch.clone()).powf_scalar(2.0).mean();
                let gradients = GradientsParams::from_grads(loss.backward(), &layer);
                optim.step(0.05, layer, gradients)
            };
            let mut layer = start;
            for batch in &batches[..3] {
                layer = step(layer, batch);
            }
            let file = tempfile::tempdir().unwrap();
            let path = file.path().join("layer");
            layer.clone().save_file(&path).unwrap();
            let mut resumed = Fp8LinearConfig::new(6, 3)
                .with_recipe(recipe.into())
                .init(&device)
                .load_file(&path);
            assert_eq!(resumed.scaling_state(), layer.scaling_state());
            for batch in &batches[3..] {
                layer = step(layer, batch);
                resumed = step(resumed, batch);
            }
            assert_eq!(resumed.scaling_state(), layer.scaling_state());
            assert_eq!(values(resumed.weight.val()), values(layer.weight.val()));
        }
    }
}

/// In a record, too, a history has the length of its recipe.
#[test]
fn a_record_fits_a_layer_of_its_history_length() {
    let device = Device::flex().autodiff();
    let mut random = Random::new(35);
    let recipe = DelayedScaling::new().with_amax_history_len(4);
    let layer = Fp8Linear::from_linear(linear(&mut random, 4, 4, &device), recipe).unwrap();
    let amaxes = [3.0, 2.0, 1.0].map(|amax| {
        let x = Tensor::<2>::full([2, 4], amax, &device);
        layer.forward(x);
        amax
    });
    let config = |length: usize| {
        let recipe = recipe.with_amax_history_len(length);
        Fp8LinearConfig::new(4, 4).with_recipe(recipe.into())
    };
    let error = config(3)
        .init(&device)
        .try_load_record(layer.clone().into_record());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("shape mismatch"), "{error}");

    let read = config(4).init(&device).load_record(layer.into_record());
    for (length, expected) in [(2, vec![0.0, amaxes[1]]), (3, vec![0.0, 0.0, amaxes[1]])] {
        let read = read.clone().with_recipe(recipe.with_amax_history_len(2));
        let read = read
            .unwrap()
            .with_recipe(recipe.with_amax_history_len(length));
        let [input, ..] = read.unwrap().scaling_state().unwrap();
        assert_eq!((input.history, input.amax), (expected, amaxes[2]));
    }
    let e5m2 = recipe.with_format(RecipeFormat::E5M2);
    assert!(read.with_recipe(e5m2).is_err());
}

/// A scale maps the same amax to the largest value of another format, even if it does not change for a long time.
#[test]
fn a_record_fits_a_layer_of_other_formats() {
    let device = Device::flex().autodiff();
    let mut random = Random::new(36);
    let hybrid = DelayedScaling::new()
        .with_amax_history_len(2)
        .with_interval(100);
    let e4m3 = hybrid.with_format(RecipeFormat::E4M3);
    let linear = linear(&mut random, 4, 4, &device);
    let scales = |layer: &Fp8Linear| layer.scaling_state().unwrap().map(|state| state.scale);
    for [from, to] in [[hybrid, e4m3], [e4m3, hybrid], [hybrid, hybrid]] {
        let layer = Fp8Linear::from_linear(linear.clone(), from).unwrap();
        let [x, g] = [(); 2].map(|()| random.matrix([3, 4], &device));
        for _ in 0..2 {
            pass_fp8(&layer, &x, &g);
        }
        let largest = values(g.abs().max())[0];
        let end = |recipe: DelayedScaling| recipe.format.gradient().max();
        let [input, weight, gradient] = scales(&layer);
        assert_eq!(gradient, end(from) / largest);
        let config = Fp8LinearConfig::new(4, 4).with_recipe(to.into());
        let read = config.init(&device).load_record(layer.into_record());
        assert_eq!(scales(&read), [input, weight, end(to) / largest]);
    }
}
