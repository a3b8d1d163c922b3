//! The loss scaler against PyTorch's, and around Burn's optimizers.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{AdamConfig, GradientsParams, SgdConfig},
    tensor::{Device, Tensor},
};
use burn_amp::{LossScaler, LossScalerConfig, LossScalerError};
use serde::Deserialize;

#[derive(Deserialize)]
struct Trace {
    config: TraceConfig,
    overflow: Vec<bool>,
    scale_and_tracker: Vec<(f32, u32)>,
}

#[derive(Deserialize)]
struct TraceConfig {
    init_scale: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u32,
}

#[test]
fn it_follows_pytorchs_grad_scaler_step_for_step() {
    let traces = include_str!("../fixtures/grad_scaler_traces.json");
    let traces: Vec<Trace> = serde_json::from_str(traces).unwrap();
    assert_eq!(traces.len(), 40);
    for trace in traces {
        let mut scaler = LossScalerConfig::new()
            .with_init_scale(trace.config.init_scale)
            .with_growth_factor(trace.config.growth_factor)
            .with_backoff_factor(trace.config.backoff_factor)
            .with_growth_interval(trace.config.growth_interval)
            .init()
            .unwrap();
        for (overflow, expected) in trace.overflow.iter().zip(&trace.scale_and_tracker) {
            scaler.update(*overflow);
            let state = scaler.state();
            assert_eq!((state.scale, state.growth_tracker), *expected);
        }
    }
}

#[test]
fn the_defaults_are_pytorchs() {
    let config = LossScalerConfig::new();
    assert_eq!(config.init_scale, 65536.0);
    assert_eq!((config.growth_factor, config.backoff_factor), (2.0, 0.5));
    assert_eq!(config.growth_interval, 2000);
    assert!(config.enabled && config.dynamic && config.min_scale.is_none());
}

fn scales(mut scaler: LossScaler, overflows: &[bool]) -> Vec<f32> {
    let next = |overflow: &bool| {
        scaler.update(*overflow);
        scaler.current_scale()
    };
    overflows.iter().map(next).collect()
}

/// DeepSpeed with hysteresis 3 from 2^8: 2^8, 2^8, 2^7, 2^6.
#[test]
fn hysteresis_is_deepspeeds() {
    let config = LossScalerConfig::new()
        .with_init_scale(256.0)
        .with_hysteresis(3);
    let scaler = config.init().unwrap();
    assert_eq!(scales(scaler, &[true; 4]), [256.0, 256.0, 128.0, 64.0]);
    let scaler = config.with_consecutive_hysteresis(true).init().unwrap();
    let overflows = [true, true, false, true, true, true];
    assert_eq!(
        scales(scaler, &overflows),
        [256.0, 256.0, 256.0, 256.0, 256.0, 128.0]
    );
}

#[test]
fn the_scale_stays_within_its_bounds() {
    let config = LossScalerConfig::new()
        .with_init_scale(4.0)
        .with_growth_interval(1)
        .with_min_scale(Some(1.0))
        .with_max_scale(Some(8.0));
    assert_eq!(
        scales(config.init().unwrap(), &[true; 4]),
        [2.0, 1.0, 1.0, 1.0]
    );
    assert_eq!(scales(config.init().unwrap(), &[false; 3]), [8.0, 8.0, 8.0]);
    // Without bounds it stops below infinity, as PyTorch's does.
    let huge = LossScalerConfig::new()
        .with_init_scale(2f64.powi(127))
        .with_growth_interval(1);
    assert_eq!(scales(huge.init().unwrap(), &[false]), [2f32.powi(127)]);
}

#[test]
fn static_and_disabled_scales_do_not_change() {
    let config = LossScalerConfig::new().with_init_scale(8.0);
    let fixed = config.clone().with_dynamic(false).init().unwrap();
    assert_eq!(scales(fixed, &[true, false, true]), [8.0; 3]);
    let disabled = config.with_enabled(false).init().unwrap();
    assert_eq!(scales(disabled, &[true; 2]), [1.0; 2]);
}

fn problem(device: &Device) -> (Linear, Tensor<2>) {
    let x = Tensor::from_floats([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]], device);
    (LinearConfig::new(3, 2).init(device), x)
}

fn weights(model: &Linear) -> Vec<f32> {
    model.weight.val().into_data().try_to_vec().unwrap()
}

/// As PyTorch tests it: a control without scaling and a scaled model, an infinity at one step.
#[test]
fn an_overflow_skips_the_step_and_nothing_else() {
    let device = Device::flex().autodiff();
    let (control, x) = problem(&device);
    let mut scaled = control.clone();
    let mut control = control;
    let (mut control_optim, mut optim) = (AdamConfig::new().init(), AdamConfig::new().init());
    let config = LossScalerConfig::new()
        .with_init_scale(1024.0)
        .with_growth_interval(2);
    let mut scaler = config.init().unwrap();
    let mut seen = Vec::new();
    for step in 0..5 {
        let overflow = step == 2;
        let loss = |model: &Linear| model.forward(x.clone()).powi_scalar(2).mean();
        if !overflow {
            let grads = GradientsParams::from_grads(loss(&control).backward(), &control);
            control = control_optim.step(0.05, control, grads);
        }
        let before = weights(&scaled);
        let factor = if overflow { f32::INFINITY } else { 1.0 };
        let grads = scaler.scale(loss(&scaled).mul_scalar(factor)).backward();
        let grads = GradientsParams::from_grads(grads, &scaled);
        let status;
        (scaled, status) = scaler.step(&mut optim, 0.05, scaled, grads);
        assert_eq!(status.overflow.is_some(), overflow);
        if let Some(overflow) = status.overflow {
            assert_eq!(overflow.parameters, ["weight", "bias"]);
            assert!(overflow.to_string().contains("weight, bias"), "{overflow}");
            assert_eq!(weights(&scaled), before);
        }
        seen.push(scaler.current_scale());
    }
    assert_eq!(seen, [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]);
    assert_eq!(weights(&scaled), weights(&control));
    assert_eq!((scaler.state().steps, scaler.state().skipped), (5, 1));
}

#[test]
fn unscaled_gradients_are_those_of_the_loss() {
    let device = Device::flex().autodiff();
    let (model, x) = problem(&device);
    let scaler = LossScalerConfig::new()
        .with_init_scale(4096.0)
        .init()
        .unwrap();
    let loss = || model.forward(x.clone()).powi_scalar(2).mean();
    let plain = model.weight.grad(&loss().backward()).unwrap();
    let grads = GradientsParams::from_grads(scaler.scale(loss()).backward(), &model);
    let unscaled = scaler.unscale(grads, &model);
    assert!(unscaled.overflow.is_none());
    // A power of two changes no bit of the mantissa.
    let grad = unscaled.grads.get::<2>(model.weight.id).unwrap();
    assert_eq!(grad.into_data(), plain.into_data());
}

/// A gradient of 2^-26 is nothing in fp16 and something with a scale of 2^16.
#[test]
fn scaling_saves_gradients_from_underflow() {
    let device = burn_amp::Autocast::fp16()
        .device(Device::flex())
        .unwrap()
        .autodiff();
    let grad = |scaler: &LossScaler| {
        let model = LinearConfig::new(2, 1).with_bias(false).init(&device);
        let x = Tensor::<2>::ones([1, 2], &device);
        let loss = model.forward(x).mul_scalar(2f32.powi(-26)).sum();
        let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
        let grads = scaler.unscale(grads, &model).grads;
        grads
            .get::<2>(model.weight.id)
            .unwrap()
            .into_data()
            .try_to_vec::<f32>()
            .unwrap()
    };
    let scaler = LossScalerConfig::new().init().unwrap();
    let off = LossScalerConfig::new().with_enabled(false).init().unwrap();
    assert_eq!(grad(&off), [0.0, 0.0]);
    assert_eq!(grad(&scaler), [2f32.powi(-26); 2]);
}

#[test]
fn the_state_survives_a_checkpoint() {
    let config = LossScalerConfig::new().with_hysteresis(2);
    let mut scaler = config.init().unwrap();
    for overflow in [true, true, false, true] {
        scaler.update(overflow);
    }
    let written = serde_json::to_string(scaler.state()).unwrap();
    let state = serde_json::from_str(&written).unwrap();
    let mut loaded = config.init().unwrap().load_state(state).unwrap();
    assert_eq!(loaded.state(), scaler.state());
    assert_eq!(loaded.config(), scaler.config());
    for overflow in [true, false, true] {
        scaler.update(overflow);
        loaded.update(overflow);
        assert_eq!(loaded.state(), scaler.state());
    }
}

#[test]
fn nonsense_is_refused() {
    let config = LossScalerConfig::new;
    for (config, what) in [
        (config().with_init_scale(0.0), "init_scale"),
        (config().with_init_scale(f64::NAN), "init_scale"),
        (config().with_growth_factor(1.0), "growth_factor"),
        (config().with_backoff_factor(1.0), "backoff_factor"),
        (config().with_backoff_factor(0.0), "backoff_factor"),
        (config().with_growth_interval(0), "growth_interval"),
        (config().with_hysteresis(0), "hysteresis"),
        (
            config().with_min_scale(Some(2.0)).with_max_scale(Some(1.0)),
            "min_scale",
        ),
    ] {
        let LossScalerError::Invalid { what: found, .. } = config.init().unwrap_err() else {
            panic!("another error");
        };
        assert_eq!(found, what);
    }
    let mut scaler = config().init().unwrap();
    assert!(scaler.set_scale(f32::INFINITY).is_err());
    scaler.set_scale(2.0).unwrap();
    assert_eq!(scaler.current_scale(), 2.0);
}

/// A module without gradients: nothing to check, nothing to step.
#[test]
fn no_gradients_are_no_overflow() {
    let (model, _) = problem(&Device::flex().autodiff());
    let mut scaler = LossScalerConfig::new().init().unwrap();
    let before = weights(&model);
    let (model, step) = scaler.step(
        &mut SgdConfig::new().init(),
        0.1,
        model,
        GradientsParams::new(),
    );
    assert!(step.overflow.is_none());
    assert_eq!(weights(&model), before);
    assert!(model.num_params() > 0);
}
