//! What goes with training on many ranks: averaged weights, learning rates, clipping.

use burn::{
    lr_scheduler::{
        cosine::CosineAnnealingLrSchedulerConfig, linear::LinearLrSchedulerConfig,
        sequential::SequentialLrSchedulerConfig,
    },
    module::{Module, ModuleMapper, Param, ParamId},
    nn::{BatchNormConfig, Linear, LinearConfig},
    optim::GradientsParams,
    tensor::{DType, Device, Distribution, FloatDType, Int, Tensor},
};
use burn_ddp::{LrScaling, ModelEma, clip_gradient_norm, scale_lr};

use crate::suite::net::contents;

fn device() -> Device {
    Device::flex().autodiff()
}

/// A model of the same kind with other weights.
fn next(inputs: usize) -> Linear {
    LinearConfig::new(inputs, 3).init(&device())
}

/// A copy with the weights of another, whose ids it does not share.
fn with_weights(model: &Linear, other: &Linear) -> Linear {
    model.clone().load_record(other.clone().into_record())
}

#[test]
fn averages_follow_the_formula() {
    let start = next(4);
    for warm_up in [false, true] {
        let mut model = start.clone();
        let mut ema = ModelEma::new(&model, 0.9).warm_up(warm_up);
        let mut expected: Vec<f64> = contents(&model).into_iter().map(f64::from).collect();
        for step in 0..30 {
            model = with_weights(&model, &next(4));
            ema.update(&model);
            let decay = match warm_up {
                true => f64::min(0.9, (1.0 + step as f64) / (10.0 + step as f64)),
                false => 0.9,
            };
            for (average, value) in expected.iter_mut().zip(contents(&model)) {
                *average = decay * *average + (1.0 - decay) * f64::from(value);
            }
        }
        assert_eq!(ema.updates(), 30);
        let before = contents(&model);
        let averaged = ema.apply(&model);
        assert!(!averaged.weight.is_require_grad());
        for (average, expected) in contents(&averaged).iter().zip(&expected) {
            assert!((f64::from(*average) - expected).abs() < 1e-6);
        }
        // The model is as it was.
        assert_eq!(contents(&model), before);
        assert!(model.weight.is_require_grad());
    }
}

#[test]
fn what_is_infinite_stays_infinite() {
    let model = |values: [f32; 2]| {
        let mut model = LinearConfig::new(1, 2).with_bias(false).init(&device());
        let values = Tensor::from_data([values], &device());
        model.weight = Param::from_tensor(values);
        model
    };
    let masked = model([f32::NEG_INFINITY, 1.0]);
    for (decay, expected) in [(0.0, 2.0), (0.5, 1.5), (1.0, 1.0)] {
        let mut ema = ModelEma::new(&masked, decay);
        assert_eq!(contents(&ema.apply(&masked)), [f32::NEG_INFINITY, 1.0]);
        ema.update(&model([f32::NEG_INFINITY, 2.0]));
        assert_eq!(contents(&ema.apply(&masked)), [f32::NEG_INFINITY, expected]);
    }
    // Nor is what is left behind, or not looked at, in the way of what is finite.
    for (decay, expected) in [(0.0, 2.0), (1.0, 1.0)] {
        let finite = [[1.0, 1.0], [2.0, 2.0]];
        let [mut old, mut new] = finite;
        if decay == 0.0 {
            old[0] = f32::INFINITY
        } else {
            new[0] = f32::INFINITY
        }
        let mut ema = ModelEma::new(&model(old), decay);
        ema.update(&model(new));
        assert_eq!(contents(&ema.apply(&masked)), [expected; 2]);
    }
}

#[test]
fn averages_survive_a_checkpoint() {
    let mut model = next(4);
    let mut ema = ModelEma::new(&model, 0.5).warm_up(true);
    for _ in 0..3 {
        model = with_weights(&model, &next(4));
        ema.update(&model);
    }
    let bytes = ema.record().into_bytes().unwrap();
    let record = burn::store::ModuleRecord::from_bytes(bytes).unwrap();
    let fresh = ModelEma::new(&next(4), 0.5).warm_up(true);
    let mut resumed = fresh.restore(record, ema.updates()).unwrap();
    // What counts is the next update.
    model = with_weights(&model, &next(4));
    ema.update(&model);
    resumed.update(&model);
    assert_eq!(
        contents(&ema.apply(&model)),
        contents(&resumed.apply(&model))
    );
    let other = ModelEma::new(&next(5), 0.5).record();
    assert!(ema.restore(other, 1).is_err());
}

#[test]
fn averages_of_16_bit_weights_do_not_stand_still() {
    struct ToBf16;
    impl ModuleMapper for ToBf16 {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.cast(FloatDType::BF16))
        }
    }
    struct Add(f32);
    impl ModuleMapper for Add {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.zeros_like().add_scalar(self.0))
        }
    }
    let model = next(4).valid().map(&mut ToBf16).map(&mut Add(1.0));
    let higher = model.clone().map(&mut Add(2.0));
    let mut ema = ModelEma::new(&model, 0.999);
    for _ in 0..1000 {
        ema.update(&higher);
    }
    let averaged = ema.apply(&higher);
    assert_eq!(averaged.weight.val().dtype(), DType::BF16);
    // 2 - 0.999^1000 = 1.632; in bf16, each update would round back to 1.
    assert!(
        contents(&averaged)
            .iter()
            .all(|it| (it - 1.632).abs() < 0.01)
    );
}

#[test]
fn running_statistics_are_averaged_and_counters_copied() {
    #[derive(Module, Debug)]
    struct Counting {
        norm: burn::nn::BatchNorm,
        steps: Param<Tensor<1, Int>>,
    }
    let device = device();
    let counting = |steps: i32| Counting {
        norm: BatchNormConfig::new(2).init(&device),
        steps: Param::initialized(ParamId::new(), Tensor::from_data([steps], &device)),
    };
    let start = counting(1);
    let mut ema = ModelEma::new(&start, 0.25);
    let model = counting(2);
    let batch = Tensor::<2>::random([8, 2], Distribution::Normal(3.0, 1.0), &device);
    model.norm.forward(batch);
    ema.update(&model);
    let mean = |model: &Counting| model.valid().norm.running_mean.value().into_data();
    let averaged = ema.apply(&model);
    let expected: Vec<f32> = mean(&model).iter::<f32>().map(|mean| mean * 0.75).collect();
    assert!(expected[0] > 0.1);
    let averaged_mean: Vec<f32> = mean(&averaged).iter::<f32>().collect();
    for (averaged, expected) in averaged_mean.iter().zip(&expected) {
        assert!((averaged - expected).abs() < 1e-6);
    }
    assert_eq!(averaged.steps.val().into_scalar::<i32>(), 2);
}

#[test]
#[should_panic(expected = "the decay, 1.5, must be between 0 and 1")]
fn a_decay_above_1_is_refused() {
    let _ = ModelEma::new(&next(4), 1.5);
}

#[test]
fn learning_rates_scale() {
    assert_eq!(scale_lr(0.1, 8, LrScaling::Linear), 0.8);
    assert_eq!(scale_lr(0.1, 16, LrScaling::Sqrt), 0.4);
    for scaling in [LrScaling::Linear, LrScaling::Sqrt] {
        assert_eq!(scale_lr(0.3, 1, scaling), 0.3);
    }
}

#[test]
fn burns_schedulers_warm_up_as_goyal_et_al_do() {
    let (base, ranks, warm_up) = (0.1, 4, 5);
    let lr = scale_lr(base, ranks, LrScaling::Linear);
    let mut scheduler = SequentialLrSchedulerConfig::new(
        vec![
            LinearLrSchedulerConfig::new(base, lr, warm_up).into(),
            CosineAnnealingLrSchedulerConfig::new(lr, 100).into(),
        ],
        vec![warm_up],
    )
    .init()
    .unwrap();
    for step in 0..=warm_up {
        let rate = scheduler.step().lr_from_param(ParamId::new(), None);
        let expected = base + (lr - base) * step as f64 / warm_up as f64;
        assert!((rate - expected).abs() < 1e-12, "step {step}: {rate}");
    }
}

#[test]
fn gradients_are_clipped_by_the_norm_of_all() {
    let model = next(4);
    let input = Tensor::<2>::random([5, 4], Distribution::Default, &device());
    let gradients = || {
        let loss = model.forward(input.clone()).powi_scalar(2).sum();
        GradientsParams::from_grads(loss.backward(), &model)
    };
    let values = |gradients: &GradientsParams| {
        let weight = gradients.get::<2>(model.weight.id).unwrap().into_data();
        let bias = gradients.get::<1>(model.bias.as_ref().unwrap().id).unwrap();
        let bias = bias.into_data();
        let all = weight.iter::<f64>().chain(bias.iter::<f64>());
        all.collect::<Vec<f64>>()
    };
    let before = values(&gradients());
    let expected = before.iter().map(|it| it * it).sum::<f64>().sqrt();
    for max_norm in [0.01, expected * 0.5, expected * 2.0] {
        let (clipped, norm) = clip_gradient_norm(gradients(), &model, max_norm).unwrap();
        assert!((norm - expected).abs() < 1e-5 * expected);
        // PyTorch's coefficient.
        let factor = f64::min(1.0, max_norm / (expected + 1e-6));
        for (clipped, before) in values(&clipped).iter().zip(&before) {
            assert!((clipped - before * factor).abs() < 1e-5);
        }
    }
    let (none, norm) = clip_gradient_norm(GradientsParams::new(), &model, 1.0).unwrap();
    assert_eq!((none.len(), norm), (0, 0.0));
}

/// As PyTorch, whose `parameters()` gives a shared one once.
#[test]
fn a_parameter_in_two_places_is_clipped_once() {
    let layer = next(4);
    let tied = vec![layer.clone(), layer.clone()];
    let mut gradients = GradientsParams::new();
    let two = Tensor::<2>::full([4, 3], 2.0, &Device::flex());
    gradients.register(layer.weight.id, two);
    let (clipped, norm) = clip_gradient_norm(gradients, &tied, 1.0).unwrap();
    let expected = 48f64.sqrt();
    assert!((norm - expected).abs() < 1e-5);
    let clipped = clipped.get::<2>(layer.weight.id).unwrap();
    let value = clipped.into_data().iter::<f64>().next().unwrap();
    assert!((value - 2.0 / expected).abs() < 1e-6, "{value}");
}

#[test]
fn a_norm_that_overflows_16_bits_is_found() {
    let model = next(4);
    let mut gradients = GradientsParams::new();
    let large = Tensor::<2>::full([4, 3], 1000.0, &Device::flex()).cast(FloatDType::F16);
    gradients.register(model.weight.id, large);
    let (clipped, norm) = clip_gradient_norm(gradients, &model, 1.0).unwrap();
    let expected = 1000.0 * 12f64.sqrt();
    assert!((norm - expected).abs() < 1e-3 * expected);
    let clipped = clipped.get::<2>(model.weight.id).unwrap();
    assert_eq!(clipped.dtype(), DType::F16);
    let value = clipped.into_data().iter::<f64>().next().unwrap();
    assert!((value - 1.0 / 12f64.sqrt()).abs() < 1e-3);
}

#[test]
fn a_norm_whose_square_overflows_is_found() {
    let model = next(4);
    let bias = model.bias.as_ref().unwrap().id;
    let gradients = |value: f32, dtype: FloatDType| {
        let device = Device::flex();
        let mut gradients = GradientsParams::new();
        let weight = Tensor::<2>::full([4, 3], value, &device).cast(dtype);
        gradients.register(model.weight.id, weight);
        gradients.register(
            bias,
            Tensor::<1>::full([3], -2.0 * value, &device).cast(dtype),
        );
        gradients
    };
    for dtype in [FloatDType::F32, FloatDType::BF16, FloatDType::F64] {
        // 2^65 is exact in all types, and its square is more than f32 has.
        let value = 2f32.powi(65);
        let (clipped, norm) = clip_gradient_norm(gradients(value, dtype), &model, 3.0).unwrap();
        let expected = f64::from(value) * 24f64.sqrt();
        assert!((norm / expected - 1.0).abs() < 1e-6, "{norm} {expected}");
        let weight = clipped.get::<2>(model.weight.id).unwrap().into_data();
        for value in weight.iter::<f64>() {
            assert!((value / (3.0 / 24f64.sqrt()) - 1.0).abs() < 4e-3, "{value}");
        }
    }
    for (value, is_expected) in [
        (f32::INFINITY, f64::is_infinite as fn(f64) -> bool),
        (f32::NAN, f64::is_nan),
    ] {
        let (_, norm) = clip_gradient_norm(gradients(value, FloatDType::F32), &model, 1.0).unwrap();
        assert!(is_expected(norm), "{norm}");
    }
}
