//! Devices that end: the program's next read fails, and the log says why.

use super::child;
use burn::tensor::{Device, Tensor};
use burn_layer::{Inputs, Layer, Layers, Op, Plan, scoped};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Capture;

impl log::Log for Capture {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() == log::Level::Error
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            LOGGED.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Whether, in the process of `test`, what `read` reads is refused and the log has the `reason`.
fn is_told(test: &str, reason: &str, read: impl FnOnce() -> Tensor<1>) {
    if child::of(test, |_| {}) {
        return;
    }
    log::set_logger(&Capture).unwrap();
    log::set_max_level(log::LevelFilter::Error);
    let late = AssertUnwindSafe(|| read().try_into_data().is_ok());
    assert!(!catch_unwind(late).unwrap_or(false), "it was read");
    let deadline = Instant::now() + Duration::from_secs(10);
    let logged = || LOGGED.lock().unwrap().join("\n");
    while !logged().contains(reason) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(logged().contains(reason), "{}", logged());
}

/// Panics at absolute values.
#[derive(Debug)]
struct Panics;

impl Layer for Panics {
    fn plan(&self, op: Op, _inputs: &Inputs) -> Option<Plan> {
        assert!(
            op != Op::float_abs,
            "a layer has no plan for absolute values"
        );
        None
    }
}

#[test]
fn a_layer_that_panics_is_told() {
    let test = "suite::panics::a_layer_that_panics_is_told";
    is_told(test, "a layer has no plan for absolute values", || {
        let device = Layers::on(Device::flex()).layer(Panics).serve().unwrap();
        Tensor::<1>::ones([1], &device).abs()
    });
}

#[test]
fn a_device_that_went_is_refused() {
    let test = "suite::panics::a_device_that_went_is_refused";
    is_told(test, "the layered device went with its lease", || {
        let lease = Layers::on(Device::flex()).layer(Panics).lease().unwrap();
        let device = lease.device();
        drop(lease);
        Tensor::<1>::ones([1], &device)
    });
}

/// Scopes are announced to every device, also to one whose session a panic ended.
#[test]
fn a_device_that_panicked_hinders_no_scope() {
    let test = "suite::panics::a_device_that_panicked_hinders_no_scope";
    is_told(test, "a layer has no plan for absolute values", || {
        let serve = || Layers::on(Device::flex()).layer(Panics).serve().unwrap();
        let (device, other) = (serve(), serve());
        let lost = Tensor::<1>::ones([1], &device).abs();
        let read = AssertUnwindSafe(|| lost.clone().try_into_data().is_ok());
        assert!(!catch_unwind(read).unwrap_or(false), "it was read");
        for _ in 0..100 {
            let one = || Tensor::<1>::ones([1], &other).exp().log();
            assert_eq!(scoped(&Arc::new(()), one).into_scalar::<f32>(), 1.0);
        }
        lost
    });
}
