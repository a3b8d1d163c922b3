//! The mode that selects on the device, against the mode that waits.

use super::{
    alone::alone,
    devices::cube_devices,
    loss_scaler_device_optimizers::mixture,
    loss_scaler_support::{Readbacks, gradients, loss, problem, traces, values},
};
use burn::{
    optim::{ModuleOptimizer, SgdConfig},
    tensor::{Bool, DType, Device, FloatDType, IntDType, Tensor, TensorData},
};
use burn_amp::{Autocast, DeviceLossScaler, DeviceOptimizer, DeviceSgdConfig, LossScalerConfig};
use burn_layer::{Layer, Layers, Op};
use std::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

const LR: f64 = 0.02;

fn update(scaler: &mut DeviceLossScaler, overflow: bool) {
    scaler.update(Tensor::<1, Bool>::from_data([overflow], &Device::flex()));
}

#[test]
fn it_follows_pytorchs_grad_scaler_step_for_step() {
    for trace in traces() {
        let mut scaler = trace.config().init_on(&Device::flex()).unwrap();
        for (overflow, expected) in trace.overflow.iter().zip(&trace.scale_and_tracker) {
            update(&mut scaler, *overflow);
            let state = scaler.state();
            assert_eq!((state.scale, state.growth_tracker), *expected);
        }
    }
}

/// The rest of the configuration, against the scaler on the host.
#[test]
fn every_option_is_that_of_the_host() {
    let config = || {
        LossScalerConfig::new()
            .with_init_scale(8.0)
            .with_growth_interval(2)
    };
    let bounded = || {
        config()
            .with_min_scale(Some(2.0))
            .with_max_scale(Some(16.0))
    };
    for config in [
        config().with_hysteresis(3),
        config()
            .with_hysteresis(2)
            .with_consecutive_hysteresis(true),
        bounded(),
        bounded().with_hysteresis(2),
        // A first scale above the maximum stays where it is.
        bounded().with_max_scale(Some(4.0)),
        // And so does one below the minimum.
        bounded().with_init_scale(1.0),
        config().with_init_scale(2f64.powi(127)),
        // More steps than there are: never.
        config().with_growth_interval(u32::MAX),
        config().with_dynamic(false),
        config().with_enabled(false),
    ] {
        let mut host = config.init().unwrap();
        let mut device = config.init_on(&Device::flex().autodiff()).unwrap();
        let mut random = 1u32;
        for _ in 0..60 {
            random = random.wrapping_mul(1664525).wrapping_add(1013904223);
            let overflow = random >> 30 == 0;
            host.update(overflow);
            update(&mut device, overflow);
            assert_eq!(device.current_scale(), host.current_scale(), "{config:?}");
            assert_eq!(&device.state(), host.state(), "{config:?}");
        }
        assert_eq!(device.config(), &config);
    }
}

#[test]
fn the_state_goes_from_one_kind_of_scaler_to_the_other() {
    let config = LossScalerConfig::new().with_hysteresis(2);
    let device = Device::flex();
    let mut host = config.init().unwrap();
    for overflow in [true, false, true] {
        host.update(overflow);
    }
    let loaded = config
        .init_on(&device)
        .unwrap()
        .load_state(host.state().clone());
    let mut loaded = loaded.unwrap();
    assert_eq!(&loaded.state(), host.state());
    update(&mut loaded, true);
    host.update(true);
    let back = config.init().unwrap().load_state(loaded.state()).unwrap();
    assert_eq!(back.state(), host.state());
    let mut broken = loaded.state();
    broken.scale = f32::NAN;
    assert!(config.init_on(&device).unwrap().load_state(broken).is_err());
}

/// A run that scales nothing for a while goes on with the scale that it had.
#[test]
fn disabled_it_keeps_the_state_that_it_was_given() {
    let device = Device::flex();
    let mut host = LossScalerConfig::new().init().unwrap();
    host.update(true);
    let disabled = LossScalerConfig::new().with_enabled(false);
    let scaler = disabled.init_on(&device).unwrap();
    let scaler = scaler.load_state(host.state().clone()).unwrap();
    assert_eq!(&scaler.state(), host.state());
    assert_eq!(scaler.current_scale(), 1.0);
}

/// A scaler of the plain device, a loss of the autocast device over it.
#[test]
fn a_loss_may_be_on_another_device() {
    let plain = Device::flex();
    let autocast = Autocast::fp16().device(plain.clone()).unwrap().autodiff();
    let mut there = LossScalerConfig::new().init_on(&autocast).unwrap();
    let mut here = LossScalerConfig::new().init_on(&plain).unwrap();
    let [expected, found] = [&mut there, &mut here].map(|scaler| {
        let (model, x) = problem(&autocast);
        let mut optim = mixture();
        let grads = gradients(scaler.scale(loss(&model, &x, false)), &model);
        let model = scaler.step(&mut optim, LR, model, grads);
        (values(&model), scaler.state())
    });
    assert_eq!(found, expected);
}

/// Two optimizers over one backward: each skips by itself.
#[test]
fn each_optimizer_skips_by_itself() {
    let device = Device::flex().autodiff();
    let (mut a, x) = problem(&device);
    let (mut b, _) = problem(&device);
    let (mut optim_a, mut optim_b) = (mixture(), mixture());
    let mut scaler = LossScalerConfig::new().init_on(&device).unwrap();
    for overflow in [true, false, true] {
        let before = (values(&a), values(&b));
        let of_a = gradients(scaler.scale(loss(&a, &x, overflow)), &a);
        let of_b = gradients(scaler.scale(loss(&b, &x, false)), &b);
        let (of_a, of_b) = (scaler.unscale(of_a, &a), scaler.unscale(of_b, &b));
        scaler.update(of_a.overflow().bool_or(of_b.overflow()));
        a = of_a.map(|grads| grads).step(&mut optim_a, LR, a);
        b = of_b.step(&mut optim_b, LR, b);
        assert_eq!(values(&a) == before.0, overflow);
        assert_ne!(values(&b), before.1);
    }
    assert_eq!(
        (scaler.state().skipped, scaler.current_scale()),
        (2, 16384.0)
    );
}

/// Parts of a model on two devices, neither of them the scaler's: PyTorch's scaler brings `found_inf` together.
#[test]
fn gradients_may_be_on_several_devices() {
    let plain = Device::flex();
    let there = || Autocast::fp16().lease(plain.clone()).unwrap();
    let leases = [there(), there()];
    let mut scaler = LossScalerConfig::new()
        .with_init_scale(256.0)
        .init_on(&plain)
        .unwrap();
    for overflow in [false, true] {
        let parts = leases
            .each_ref()
            .map(|lease| problem(&lease.device().autodiff()));
        let [a, b] = &parts;
        let of = |(model, x): &(_, _), overflow| {
            let grads = gradients(scaler.scale(loss(model, x, overflow)), model);
            scaler.unscale(grads, model)
        };
        let (of_a, of_b) = (of(a, false), of(b, overflow));
        let any = of_a.overflow().bool_or(of_b.overflow());
        // As if another rank had sent it.
        let sent = any.clone().to_device(&leases[0].device());
        scaler.update(any);
        let stepped = of_a.agree(sent).step(&mut mixture(), LR, a.0.clone());
        assert_eq!(values(&stepped) == values(&a.0), overflow);
        let stepped = of_b.step(&mut mixture(), LR, b.0.clone());
        assert_eq!(values(&stepped) == values(&b.0), overflow);
    }
    assert_eq!(scaler.state().skipped, 1);
}

/// The dtype that a device gives tensors by default is none of the scaler's business.
#[test]
fn a_device_may_have_another_default_dtype() {
    let test = "suite::loss_scaler_device::a_device_may_have_another_default_dtype";
    // A device is configured once, before anyone uses it.
    alone(test, in_another_default_dtype);
}

fn in_another_default_dtype() {
    let lease = || Autocast::bf16().lease(Device::flex()).unwrap();
    let leases = [lease(), lease(), lease()];
    let defaults = [FloatDType::BF16, FloatDType::F16, FloatDType::F64];
    for (default, lease) in defaults.into_iter().zip(&leases) {
        let mut device = lease.device();
        device.configure((default, IntDType::I32)).unwrap();
        let device = device.autodiff();
        for overflow in [false, true] {
            let (mut model, x) = problem(&device);
            let wide = |data: TensorData| data.convert::<f32>();
            let data = wide(model.weight.val().into_data());
            let weight = Tensor::<2>::from_data(data, (&device, DType::F32));
            model.weight = model.weight.map(|_| weight.require_grad());
            let bias = model.bias.take().unwrap();
            let data = wide(bias.val().into_data());
            let values_of_bias = Tensor::<1>::from_data(data, (&device, DType::F32));
            model.bias = Some(bias.map(|_| values_of_bias.require_grad()));
            let x = x.cast(FloatDType::F32);

            let mut host = LossScalerConfig::new().init().unwrap();
            let grads = gradients(host.scale(loss(&model, &x, overflow)), &model);
            let mut sgd: ModuleOptimizer = SgdConfig::new().init();
            let (expected, _) = host.step(&mut sgd, LR, model.clone(), grads);

            let mut scaler = LossScalerConfig::new().init_on(&device).unwrap();
            let mut optim = DeviceOptimizer::from(DeviceSgdConfig::new().build());
            let grads = gradients(scaler.scale(loss(&model, &x, overflow)), &model);
            let found = scaler.step(&mut optim, LR, model, grads);
            assert_eq!(found.weight.val().dtype(), DType::F32, "{default:?}");
            assert_eq!(values(&found), values(&expected), "{default:?}");
            assert_eq!(&scaler.state(), host.state());
        }
    }
}

#[test]
fn disabled_it_passes_everything_through() {
    let device = Device::flex().autodiff();
    let (model, x) = problem(&device);
    let config = LossScalerConfig::new().with_enabled(false);
    let mut scaler = config.init_on(&device).unwrap();
    let plain = DeviceSgdConfig::new().build();
    let grads = gradients(loss(&model, &x, false), &model);
    let expected = ModuleOptimizer::from(plain.clone()).step(LR, model.clone(), grads);
    let grads = gradients(scaler.scale(loss(&model, &x, false)), &model);
    let stepped = scaler.step(&mut plain.into(), LR, model, grads);
    assert_eq!(values(&stepped), values(&expected));
    assert_eq!((scaler.current_scale(), scaler.state().steps), (1.0, 0));
}

/// CubeCL's kernels for masks, booleans and NaN. Few of them: each is compiled first.
#[test]
fn cubecl_selects_as_flex_does() {
    let train = |device: Device| {
        let (mut model, _) = problem(&device.clone().autodiff());
        let mut optim = DeviceSgdConfig::new().build().into();
        let config = LossScalerConfig::new().with_growth_interval(1);
        let mut scaler = config.init_on(&device).unwrap();
        let step = |gradient: f32| {
            let bias = model.bias.as_ref().unwrap().id;
            let mut grads = burn::optim::GradientsParams::new();
            grads.register(bias, Tensor::<1>::from_floats([1.0, gradient], &device));
            model = scaler.step(&mut optim, 65536.0, model.clone(), grads);
            (scaler.current_scale(), values(&model))
        };
        [f32::NAN, 2.0, f32::INFINITY, -1.0].map(step)
    };
    for device in cube_devices() {
        assert_eq!(train(device), train(Device::flex()));
    }
}

/// From far too high, the scale falls to the largest power of two with which fp16 holds every
/// gradient, those by the layer's output, `2 y / 4`, and by its weight. From 65520 on, it rounds to
/// infinity.
#[test]
fn the_scale_settles_where_fp16_ends() {
    let (model, x) = problem(&Device::flex().autodiff());
    let weight = gradients(loss(&model, &x, false), &model);
    let weight = weight.get::<2>(model.weight.id).unwrap();
    let output = model.forward(x).inner().mul_scalar(2.0 / 4.0);
    let largest = Tensor::cat(vec![weight, output], 0).abs().max();
    let largest: f32 = largest.into_scalar();
    let halvings = (0..).find(|halvings| 2f32.powi(40 - halvings) * largest < 65520.0);
    let expected = 2f32.powi(40 - halvings.unwrap());

    let device = Autocast::fp16().device(Device::flex()).unwrap().autodiff();
    let (mut model, x) = problem(&device);
    let (mut twin, _) = problem(&device);
    let config = LossScalerConfig::new().with_init_scale(2f64.powi(40));
    let mut scaler = config.init_on(&device).unwrap();
    let mut host = config.init().unwrap();
    let mut optim = DeviceOptimizer::from(DeviceSgdConfig::new().build());
    let mut burns = SgdConfig::new().init();
    for _ in 0..halvings.unwrap() + 2 {
        // Steps too small to change the outputs by much.
        let grads = gradients(scaler.scale(loss(&model, &x, false)), &model);
        model = scaler.step(&mut optim, 1e-6, model, grads);
        let grads = gradients(host.scale(loss(&twin, &x, false)), &twin);
        twin = host.step(&mut burns, 1e-6, twin, grads).0;
    }
    assert_eq!(&scaler.state(), host.state());
    assert_eq!(scaler.current_scale(), expected);
    assert_eq!(host.state().skipped, halvings.unwrap() as u64);
    assert_eq!(values(&model), values(&twin));
}

#[test]
fn nothing_is_read_back() {
    let (readbacks, device) = Readbacks::device();
    let (mut model, x) = problem(&device);
    let mut optim = mixture();
    let mut scaler = LossScalerConfig::new().init_on(&device).unwrap();
    readbacks.take();
    for overflow in [false, true, false] {
        let grads = gradients(scaler.scale(loss(&model, &x, overflow)), &model);
        model = scaler.step(&mut optim, LR, model, grads);
    }
    device.sync().unwrap();
    assert_eq!(readbacks.take(), 0);
    assert_eq!(scaler.current_scale(), 32768.0);
    assert_eq!(readbacks.take(), 1);
    assert!(values(&model).iter().all(|value| value.is_finite()));
}

/// A device that stands still until it is let go.
#[derive(Clone, Debug, Default)]
struct Gate {
    /// Whether it stands still, and a signal when that changes.
    closed: Arc<(Mutex<bool>, Condvar)>,
    /// Nobody let it go in time: it is being waited for.
    gave_up: Arc<AtomicBool>,
}

impl Gate {
    fn close(&self, closed: bool) {
        *self.closed.0.lock().unwrap() = closed;
        self.closed.1.notify_all();
    }
}

impl Layer for Gate {
    fn ran(&self, _op: Op, _dtype: DType) {
        let (closed, changed) = &*self.closed;
        let patience = Duration::from_secs(60);
        let closed = closed.lock().unwrap();
        let waited = changed.wait_timeout_while(closed, patience, |closed| *closed);
        let (mut closed, result) = waited.unwrap();
        if result.timed_out() {
            *closed = false;
            self.gave_up.store(true, Ordering::SeqCst);
        }
    }
}

/// The host gets through several steps while the device does not compute a single op.
#[test]
fn the_host_never_waits() {
    let gate = Gate::default();
    let device = Layers::on(Device::flex()).layer(gate.clone());
    let device = device.serve().unwrap().autodiff();
    let (mut model, x) = problem(&device);
    let before = values(&model);
    let mut optim = mixture();
    let mut scaler = LossScalerConfig::new().init_on(&device).unwrap();
    gate.close(true);
    for overflow in [false, true, false] {
        let grads = gradients(scaler.scale(loss(&model, &x, overflow)), &model);
        model = scaler.step(&mut optim, LR, model, grads);
    }
    gate.close(false);
    assert!(!gate.gave_up.load(Ordering::SeqCst), "the host waited");
    assert_eq!((scaler.state().steps, scaler.state().skipped), (3, 1));
    assert_ne!(values(&model), before);
}
