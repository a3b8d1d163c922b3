//! The optimizers that a device can tell to skip, under both kinds of scaler and against Burn's.

use super::{
    devices::cube_devices,
    loss_scaler_support::{Trace, gradients, loss, problem, traces, values},
};
use burn::{
    grad_clipping::GradientClipping,
    module::{Module, Param, ParamGroup, ParamId},
    nn::Linear,
    optim::{
        AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, Optimizer, OptimizerRecord, Sgd,
        SgdConfig, decay::WeightDecayConfig, momentum::MomentumConfig,
    },
    tensor::{DType, Device, Tensor},
};
use burn_amp::{
    DeviceAdam, DeviceAdamConfig, DeviceLossScaler, DeviceOptimizer, DeviceSgd, DeviceSgdConfig,
    LossScalerConfig,
};

/// Runs of PyTorch whose scale stays where this problem's gradients are finite.
fn tame_traces() -> impl Iterator<Item = Trace> {
    let tame = |trace: &Trace| {
        trace
            .scale_and_tracker
            .iter()
            .all(|(scale, _)| *scale < 1e20)
    };
    let found: Vec<_> = traces().into_iter().filter(tame).collect();
    assert!(found.len() > 10);
    found.into_iter().step_by(4)
}

const LR: f64 = 0.02;

/// As a bank of adapters, or an embedding, that has no rows yet.
#[derive(Module, Debug)]
struct WithEmpty {
    empty: Param<Tensor<2>>,
    filled: Param<Tensor<1>>,
}

#[test]
fn parameters_without_elements_pass() {
    for device in cube_devices().into_iter().chain([Device::flex()]) {
        let optimizers = [
            DeviceOptimizer::from(DeviceAdamConfig::new().build()),
            DeviceOptimizer::from(
                DeviceSgdConfig::new()
                    .with_momentum(Some(MomentumConfig::new()))
                    .build(),
            ),
        ];
        for mut optim in optimizers {
            let param = |rows: usize| Tensor::<2>::ones([rows, 2], &device);
            let trained = device.clone().autodiff();
            let model = WithEmpty {
                empty: Param::initialized(ParamId::new(), Tensor::ones([0, 2], &trained)),
                filled: Param::initialized(ParamId::new(), Tensor::ones([2], &trained)),
            };
            let grads = || {
                let mut grads = GradientsParams::new();
                grads.register(model.empty.id, param(0));
                grads.register(
                    model.filled.id,
                    param(1).reshape::<1, _>([2]).mul_scalar(64.0),
                );
                grads
            };
            let config = LossScalerConfig::new().with_init_scale(64.0);
            let mut on_device = config.init_on(&device).unwrap();
            let (unscaled, norm) = on_device.unscale(grads(), &model).clip_norm(&model, 1.0);
            let norm = norm.unwrap().into_data().iter::<f64>().next().unwrap();
            on_device.update(unscaled.overflow());
            assert!((norm - 2f64.sqrt()).abs() < 1e-6, "{norm}");
            let stepped = unscaled.step(&mut optim, 0.1, model.clone());
            assert_eq!(stepped.empty.dims(), [0, 2]);
            let values: Vec<f32> = stepped.filled.val().into_data().try_to_vec().unwrap();
            assert!(values.iter().all(|value| *value < 1.0), "{values:?}");
            assert_eq!(on_device.state().skipped, 0);

            let host = config.init().unwrap();
            let (unscaled, norm) = host.unscale(grads(), &model).clip_norm(&model, 1.0);
            assert!((norm - 2f64.sqrt()).abs() < 1e-6, "{norm}");
            let (_, step) = unscaled.into_parts();
            assert!(step.checked && step.overflow.is_none());
        }
    }
}

/// The parameters after each step of a trace, on the device.
fn on_device(trace: &Trace, mut optim: DeviceOptimizer) -> Vec<Vec<f32>> {
    let device = Device::flex().autodiff();
    let (mut model, x) = problem(&device);
    let mut scaler = trace.config().init_on(&device).unwrap();
    let steps = trace.overflow.iter().zip(&trace.scale_and_tracker);
    let step = |(overflow, (scale, _)): (&bool, &(f32, u32))| {
        let grads = gradients(scaler.scale(loss(&model, &x, *overflow)), &model);
        model = scaler.step(&mut optim, LR, model.clone(), grads);
        assert_eq!(scaler.current_scale(), *scale);
        values(&model)
    };
    steps.map(step).collect()
}

/// The same with a host that waits.
fn waiting(trace: &Trace, mut optim: ModuleOptimizer) -> Vec<Vec<f32>> {
    let device = Device::flex().autodiff();
    let (mut model, x) = problem(&device);
    let mut scaler = trace.config().init().unwrap();
    let step = |overflow: &bool| {
        let grads = gradients(scaler.scale(loss(&model, &x, *overflow)), &model);
        model = scaler.step(&mut optim, LR, model.clone(), grads).0;
        values(&model)
    };
    trace.overflow.iter().map(step).collect()
}

fn momentum(nesterov: bool) -> MomentumConfig {
    MomentumConfig::new().with_nesterov(nesterov)
}

/// Burn's SGD and that of the device, configured alike.
fn sgds() -> Vec<(Sgd, DeviceSgd)> {
    let decay = || Some(WeightDecayConfig { penalty: 0.1 });
    [
        (None, None),
        (Some(momentum(false)), None),
        (Some(momentum(true)), decay()),
    ]
    .map(|(momentum, decay)| {
        let burns = SgdConfig::new()
            .with_momentum(momentum.clone())
            .with_weight_decay(decay.clone());
        let ours = DeviceSgdConfig::new()
            .with_momentum(momentum)
            .with_weight_decay(decay);
        (burns.build(), ours.build())
    })
    .into()
}

#[test]
fn sgd_equals_the_waiting_mode_with_burns_sgd() {
    for trace in tame_traces() {
        for (burns, ours) in sgds() {
            assert_eq!(
                on_device(&trace, ours.into()),
                waiting(&trace, burns.into())
            );
        }
    }
}

fn assert_close(found: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (found, expected) in found.iter().zip(expected) {
            let error = (found - expected).abs();
            assert!(
                error <= tolerance,
                "step {step}: {found}, expected {expected}"
            );
        }
    }
}

/// Burn's Adam counts its steps in a `usize` and rounds `1 - beta^t` to f32: at the first step
/// that is 6e-5 of the second correction, and as much of a step of `LR`.
#[test]
fn adam_equals_the_waiting_mode() {
    let plain = DeviceAdamConfig::new();
    let l2 = DeviceAdamConfig::new().with_weight_decay(0.1);
    let decoupled = l2.clone().with_decoupled_weight_decay(true);
    let decay = Some(WeightDecayConfig { penalty: 0.1 });
    let burns: [(DeviceAdam, ModuleOptimizer); 3] = [
        (plain.build(), AdamConfig::new().init()),
        (
            l2.build(),
            AdamConfig::new().with_weight_decay(decay).init(),
        ),
        (
            decoupled.build(),
            AdamWConfig::new().with_weight_decay(0.1).init(),
        ),
    ];
    for trace in tame_traces() {
        for (ours, burns) in &burns {
            let found = on_device(&trace, ours.clone().into());
            // The same optimizer under the scaler that waits: bit for bit.
            assert_eq!(found, waiting(&trace, ours.clone().into()));
            assert_close(&found, &waiting(&trace, burns.clone()), 2e-5);
        }
    }
}

/// In bf16, 0.999 of a number from 0.5 on is that number again. The correction is no such number.
#[test]
fn adam_corrects_in_16_bits_as_burns_does() {
    fn last_step(adam: impl Optimizer, device: &Device) -> f32 {
        let on = |value: f32| Tensor::<1>::full([1], value, (device, DType::BF16));
        let mut state = None;
        let mut moved = on(0.0);
        for _ in 0..2_000 {
            (moved, state) = adam.step(LR, on(0.0), on(1.0), state);
        }
        moved.into_data().iter::<f32>().next().unwrap()
    }
    let device = Device::flex();
    let found = last_step(DeviceAdamConfig::new().build(), &device);
    let expected = last_step(AdamConfig::new().build(), &device);
    assert!(
        (found / expected - 1.0).abs() < 0.02,
        "{found}, expected {expected}"
    );
}

/// AdamW as Burn has it without any setting, step by step. A gradient of 0 leaves the decay alone, bit for bit; with a rate of
/// 100, a decay of 1e-4 takes a hundredth.
#[test]
fn adamw_has_the_defaults_of_burns() {
    let device = Device::flex();
    let (ours, burns) = (
        DeviceAdamConfig::adamw().build(),
        AdamWConfig::new().build(),
    );
    let start = || Tensor::<1>::from_floats([0.5, -2.0, 3.0], &device);
    let read = |tensor: &Tensor<1>| tensor.clone().into_data().try_to_vec::<f32>().unwrap();
    let (mut found, mut expected) = (start(), start());
    let (mut state, mut burns_state) = (None, None);
    for step in 1..=5 {
        let grad = Tensor::zeros([3], &device);
        (found, state) = ours.step(100.0, found, grad.clone(), state);
        (expected, burns_state) = burns.step(100.0, expected, grad, burns_state);
        assert_eq!(read(&found), read(&expected));
        let decayed = 0.5 * 0.99f32.powi(step);
        assert!((read(&found)[0] / decayed - 1.0).abs() < 1e-5);
    }
    let (mut found, mut expected) = (start(), start());
    let (mut state, mut burns_state) = (None, None);
    for step in 0..20 {
        let grad = (0..3).map(|place| ((step * 3 + place) as f32).sin());
        let grad = Tensor::<1>::from_floats(grad.collect::<Vec<_>>().as_slice(), &device);
        (found, state) = ours.step(LR, found, grad.clone(), state);
        (expected, burns_state) = burns.step(LR, expected, grad, burns_state);
        assert_close(&[read(&found)], &[read(&expected)], 2e-5);
    }
}

/// Kingma and Ba's algorithm in f64, as the paper has it.
#[test]
fn adam_is_the_papers() {
    let gradients = [0.5f64, -1.25, 3.0, 1e-3, -0.75];
    let (beta_1, beta_2) = (f64::from(0.9f32), f64::from(0.999f32));
    let (mut theta, mut m, mut v) = (0.25f64, 0.0, 0.0);
    let optim = DeviceAdamConfig::new().build();
    let device = Device::flex();
    let mut tensor = Tensor::<1>::from_floats([0.25], &device);
    let mut state = None;
    for (t, g) in (1..).zip(gradients) {
        m = beta_1 * m + (1.0 - beta_1) * g;
        v = beta_2 * v + (1.0 - beta_2) * g * g;
        let (m_hat, v_hat) = (m / (1.0 - beta_1.powi(t)), v / (1.0 - beta_2.powi(t)));
        theta -= 0.1 * m_hat / (v_hat.sqrt() + 1e-5);
        let grad = Tensor::from_floats([g as f32], &device);
        (tensor, state) = optim.step(0.1, tensor, grad, state);
        let found = f64::from(tensor.clone().into_scalar::<f32>());
        assert!(
            (found - theta).abs() < 5e-7,
            "step {t}: {found}, expected {theta}"
        );
    }
}

/// A mixture, clipped: groups of the device's optimizers under both scalers.
pub(super) fn mixture() -> DeviceOptimizer {
    let sgd = DeviceSgdConfig::new().with_momentum(Some(momentum(false)));
    DeviceOptimizer::from(DeviceAdamConfig::new().build())
        .with_grad_clipping(GradientClipping::Norm(0.1))
        .with_group(
            ParamGroup::from_predicate("bias"),
            sgd.build(),
            Some(GradientClipping::Value(0.05)),
        )
}

#[test]
fn groups_and_clipping_equal_the_waiting_mode() {
    let optim = mixture();
    assert!(optim.as_ref().has_gradient_clipping());
    for trace in tame_traces() {
        let expected = waiting(&trace, optim.as_ref().clone());
        assert_eq!(on_device(&trace, optim.clone()), expected);
    }
}

/// Interrupted after an overflow and loaded into a new optimizer, training goes on as it was.
#[test]
fn the_optimizers_survive_a_checkpoint() {
    let device = Device::flex().autodiff();
    let (mut model, x) = problem(&device);
    let mut scaler = LossScalerConfig::new().init_on(&device).unwrap();
    let step = |model: Linear, optim: &mut DeviceOptimizer, scaler: &mut DeviceLossScaler, bad| {
        let grads = gradients(scaler.scale(loss(&model, &x, bad)), &model);
        scaler.step(optim, LR, model, grads)
    };
    let mut optim = mixture();
    for overflow in [true, false, false, true] {
        model = step(model, &mut optim, &mut scaler, overflow);
    }
    let bytes = optim.as_ref().to_record().into_bytes().unwrap();
    let mut loaded = mixture().load_record(OptimizerRecord::from_bytes(bytes).unwrap());
    let mut twin = model.clone();
    for overflow in [false, true, false] {
        model = step(model, &mut optim, &mut scaler.clone(), overflow);
        twin = step(twin, &mut loaded, &mut scaler.clone(), overflow);
        assert_eq!(values(&twin), values(&model));
    }
}
