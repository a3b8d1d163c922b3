//! The effect of mappers on a layer's state.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fp8::recipe::DelayedScaling;
use burn_fp8::{Fp8Linear, ScalingState};

use super::super::device::{Random, devices};
use super::{linear, pass_fp8};

/// A layer after two steps, with these amaxes of the input and of the gradient.
fn trained(device: &Device, input: f32, gradient: f32) -> Fp8Linear {
    let mut random = Random::new(61);
    let recipe = DelayedScaling::new().with_amax_history_len(4);
    let layer = Fp8Linear::from_linear(linear(&mut random, 4, 3, device), recipe).unwrap();
    for _ in 0..2 {
        let x = Tensor::<2>::full([2, 4], input, device);
        let g = Tensor::<2>::full([2, 3], gradient, device);
        pass_fp8(&layer, &x, &g);
    }
    layer
}

fn state(layer: &Fp8Linear) -> [ScalingState; 3] {
    layer.scaling_state().unwrap()
}

/// burn-train's data parallel strategies do this with every float parameter (`ModuleSharder`). Burn has it on CubeCL's devices.
#[cfg(feature = "cpu")]
#[test]
fn a_sharder_marks_all_parameters() {
    struct Sharder(usize);

    impl ModuleMapper for Sharder {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0 += 1;
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(id, tensor.set_distributed(id), mapper)
        }
    }

    let layer = trained(&Device::cpu().autodiff(), 2.0, 3.0);
    let before = state(&layer);
    let mut sharder = Sharder(0);
    let layer = layer.map(&mut sharder);
    // Weight, bias, three histories, scales and amaxes, and the steps.
    assert_eq!(sharder.0, 12);
    assert_eq!(state(&layer), before);
    assert!(layer.weight.val().is_distributed());
}

/// The state has the autodiff of the parameters, so that a mapper can treat both alike.
#[test]
fn a_mapper_finds_the_autodiff_of_the_layer() {
    struct Found(Vec<String>);

    impl ModuleMapper for Found {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let strategy = param.val().gradient_checkpointing_strategy();
            self.0.push(format!("{strategy:?}"));
            param
        }
    }

    let check = |layer: Fp8Linear, expected: &str| {
        let mut found = Found(vec![]);
        let layer = layer.map(&mut found);
        assert_eq!(found.0, vec![expected; 12]);
        // And the state is left as it was.
        let [scale, ..] = state(&layer);
        assert!(scale.scale > 0.0);
        layer
    };
    let plain = Device::flex();
    let autodiff = plain.clone().autodiff();
    let checkpointing = autodiff.clone().gradient_checkpointing();
    let layer = check(trained(&autodiff, 2.0, 3.0), "Some(Disabled)");
    let valid = check(layer.valid(), "None");
    check(valid.train(), "Some(Disabled)");
    check(trained(&checkpointing, 2.0, 3.0), "Some(Balanced)");
    let untrained = linear(&mut Random::new(62), 4, 3, &plain);
    check(Fp8Linear::from(untrained), "None");
}

/// Ordinary scales and amaxes can be beyond f16, whose largest number is 65504.
#[test]
fn a_cast_of_the_model_leaves_numbers_in_the_state() {
    struct Cast;

    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(FloatDType::F16))
        }
    }

    for device in devices() {
        let layer = trained(&device.autodiff(), 1e-3, 1e6);
        let before = state(&layer);
        assert!(before[0].scale > 65504.0);
        let half = layer.map(&mut Cast);
        assert_eq!(half.weight.val().dtype(), DType::F16);
        let after = state(&half);
        assert_eq!(after[0].scale, before[0].scale);
        assert_eq!(after[2].history, before[2].history);
        assert_eq!(after[2].amax, before[2].amax);
        // The gradient's scale is 0.057.
        let f16 = |value: f32| half::f16::from_f32(value).to_f32();
        assert_eq!(after[2].scale, f16(before[2].scale));
        let small = before[0]
            .history
            .iter()
            .copied()
            .map(f16)
            .collect::<Vec<_>>();
        assert_eq!(after[0].history, small);
    }
}

/// This is what loading a record does that was saved in f16.
#[test]
fn a_scale_that_no_record_should_have_is_not_loaded() {
    struct Load(f32);

    impl ModuleMapper for Load {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let value = param.val();
            let loaded = Tensor::full(value.dims(), self.0, (&value.device(), DType::F16));
            let id = param.id;
            param.transform_for_load(loaded, id)
        }
    }

    let device = Device::flex().autodiff();
    for bad in [f32::INFINITY, f32::NAN, 0.0, -1.0] {
        let layer = trained(&device, 2.0, 4.0);
        let scales = |layer: &Fp8Linear| state(layer).map(|state| state.scale);
        let before = scales(&layer);
        assert_eq!(scales(&layer.map(&mut Load(bad))), before, "{bad}");
    }
    // The recorded scale is for e4m3. For e5m2 it is 128 times as much, which is more than f16 holds.
    let layer = trained(&device, 2.0, 4.0).map(&mut Load(1024.0));
    let [input, _, gradient] = state(&layer);
    assert_eq!((input.scale, gradient.scale), (1024.0, 131072.0));
}
