//! Several losses of one step, each with gradients of its own: one update of the scale that they share.

use super::loss_scaler_support::{loss, problem};
use burn::{
    module::{Devices, Module, ModuleMapper, ModuleVisitor},
    nn::Linear,
    tensor::Device,
};
use burn_amp::{LossScalerConfig, SharedLossScaler};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// A model during whose backward something else happens: losses of other threads are scaled, checked and counted.
#[derive(Clone)]
struct Meanwhile {
    linear: Linear,
    happens: Arc<dyn Fn() + Send + Sync>,
    happened: Arc<AtomicBool>,
}

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.linear.fmt(f)
    }
}

impl Module for Meanwhile {
    /// The gradients are collected when backward is over, before they are unscaled.
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        if !self.happened.swap(true, Ordering::Relaxed) {
            (self.happens)();
        }
        self.linear.visit(visitor);
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.linear.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        let linear = self.linear.fork(device);
        Self { linear, ..self }
    }

    fn to_device(self, device: &Device) -> Self {
        let linear = self.linear.to_device(device);
        Self { linear, ..self }
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let linear = self.linear.map(mapper);
        Self { linear, ..self }
    }
}

/// A loss that overflows or not, and during its backward something else.
fn gradients(
    scaler: &SharedLossScaler,
    overflows: bool,
    meanwhile: impl Fn() + Send + Sync + 'static,
) {
    let (linear, x) = problem(&Device::flex().autodiff());
    let loss = loss(&linear, &x, overflows);
    let model = Meanwhile {
        linear,
        happens: Arc::new(meanwhile),
        happened: Arc::default(),
    };
    let (_, step) = scaler.gradients(loss, &model);
    let enabled = scaler.with(|scaler| scaler.config().enabled);
    assert_eq!(step.overflow.is_some(), overflows && enabled);
}

/// All are scaled before the first is counted, which is the last of these.
fn losses(scaler: &SharedLossScaler, overflows: &[bool]) {
    if let [last, others @ ..] = overflows {
        let (shared, others) = (scaler.clone(), others.to_vec());
        gradients(scaler, *last, move || losses(&shared, &others));
    }
}

/// Whichever of three losses overflow, in each of three steps: the scaler is that of one update a step.
#[test]
fn losses_of_a_step_make_one_update_in_any_order() {
    let config = || LossScalerConfig::new().with_init_scale(64.0);
    for config in [
        config().with_growth_interval(1),
        config().with_growth_interval(2).with_hysteresis(2),
        config()
            .with_growth_interval(3)
            .with_hysteresis(2)
            .with_consecutive_hysteresis(true),
        config().with_dynamic(false),
        config().with_enabled(false),
    ] {
        for steps in 0..8u32.pow(3) {
            let scaler = SharedLossScaler::from(config.init().unwrap());
            let mut expected = config.init().unwrap();
            for step in 0..3 {
                let overflows = [0, 1, 2].map(|loss| steps >> (3 * step + loss) & 1 == 1);
                losses(&scaler, &overflows);
                expected.update(overflows.contains(&true));
            }
            scaler.with(|scaler| {
                assert_eq!(scaler.state(), expected.state(), "{config:?} {steps:o}");
                assert_eq!(scaler.history(), expected.history(), "{config:?} {steps:o}");
            });
        }
    }
}

fn scaler() -> SharedLossScaler {
    let config = LossScalerConfig::new().with_init_scale(64.0);
    config.init().unwrap().into()
}

/// Finite, it says nothing; else it tells of its scale, if that still holds.
#[test]
fn a_loss_that_is_done_steps_later_lowers_the_scale_that_it_had() {
    for (late, steps, expected) in [
        (false, [false, false], (64.0, 0)),
        (true, [false, false], (32.0, 1)),
        (true, [false, true], (32.0, 1)),
    ] {
        let scaler = scaler();
        let shared = scaler.clone();
        gradients(&scaler, late, move || {
            steps.iter().for_each(|step| losses(&shared, &[*step]));
        });
        let state = scaler.with(|scaler| scaler.state().clone());
        assert_eq!((state.scale, state.skipped), expected, "{late} {steps:?}");
    }
}

#[test]
fn a_scale_that_was_set_since_stays() {
    let scaler = scaler();
    let shared = scaler.clone();
    gradients(&scaler, true, move || {
        losses(&shared, &[false]);
        shared.with(|scaler| scaler.set_scale(8.0)).unwrap();
    });
    assert_eq!(scaler.current_scale(), 8.0);
}
