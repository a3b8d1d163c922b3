//! Which device an autocast device is, and how long.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_amp::{Autocast, Fp8Filter, LayerError, NanGuard, Op, Policy, recipe::CurrentScaling};

use super::{devices::devices, logged::logged};

#[test]
fn the_same_policy_over_the_same_device_is_the_same_device() {
    let device = |autocast: Autocast| autocast.device(Device::flex()).unwrap();
    assert_eq!(device(Autocast::bf16()), device(Autocast::bf16()));
    assert_eq!(
        device(Autocast::new(Policy::o1())),
        device(Autocast::new(Policy::o1()))
    );
    assert_ne!(device(Autocast::bf16()), device(Autocast::fp16()));
    let reduced = || device(Autocast::bf16().reduced_precision_reduction(true));
    assert_eq!(reduced(), reduced());
    assert_ne!(reduced(), device(Autocast::bf16()));
    let autodiff = Autocast::bf16().device(Device::flex().autodiff()).unwrap();
    assert_eq!(autodiff.clone().inner(), device(Autocast::bf16()).inner());
    assert!(autodiff.is_autodiff());
    let own = Autocast::bf16().with_report(Device::flex()).unwrap();
    assert_ne!(own.device, device(Autocast::bf16()));
}

/// As on a plain device, the program may catch a panic and go on.
#[test]
fn a_device_whose_session_has_ended_is_made_anew() {
    let policy = Policy::builder(FloatDType::BF16).name("ends").build();
    let device = || {
        Autocast::new(policy.clone())
            .device(Device::flex())
            .unwrap()
    };
    let ended = device();
    let out_of_range = || {
        let row = Tensor::<1, Int>::from_ints([7], &ended);
        let rows = Tensor::<2>::ones([2, 2], &ended).select(0, row);
        rows.try_into_data().is_ok()
    };
    let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(out_of_range));
    assert!(!read.unwrap_or(false), "there is no seventh row");
    let x = Tensor::<2>::ones([2, 2], &device());
    assert_eq!(x.clone().matmul(x).sum().into_scalar::<f32>(), 8.0);
    assert_ne!(device(), ended);
    assert_eq!(device(), device());
}

#[test]
fn a_lease_counts_and_goes() {
    let lease = Autocast::bf16().lease(Device::flex()).unwrap();
    let x = Tensor::<2>::ones([2, 2], &lease.device());
    let y = x.clone().matmul(x);
    y.clone().into_data();
    let report = lease.report();
    assert_eq!(report.runs_of(Op::float_matmul, DType::BF16), 1);
    // Four elements of two bytes.
    assert_eq!(report.low_bytes, 8);
    assert!(report.to_string().contains("8 bytes kept low"), "{report}");

    let device = lease.device();
    drop(lease);
    assert_eq!(y.sum().into_scalar::<f32>(), 8.0);
    drop(device);
}

#[test]
fn bf16_is_refused_where_there_is_none() {
    for device in devices() {
        let has = device.supports_dtype(DType::BF16);
        match Autocast::bf16().device(device) {
            Ok(_) => assert!(has),
            Err(error) => {
                assert!(!has);
                let text = error.to_string();
                assert!(text.contains("cannot compute in BF16; it can in"), "{text}");
            }
        }
    }
}

#[test]
fn a_dtype_that_the_device_cannot_hold_is_refused_with_those_that_it_can() {
    let policy = Policy::builder(FloatDType::Flex32).build();
    let error = Autocast::new(policy).device(Device::flex()).unwrap_err();
    assert!(matches!(error, LayerError::UnsupportedDType { .. }));
    let text = error.to_string();
    for dtype in ["Flex32", "F64", "F32", "F16", "BF16"] {
        assert!(text.contains(dtype), "{text}");
    }
}

#[test]
fn settings_for_fp8_that_change_nothing_are_logged() {
    let settings: [fn(Autocast) -> Autocast; 2] = [
        |autocast| autocast.fp8_filter(Fp8Filter::new()),
        |autocast| autocast.rest(Policy::fp16()),
    ];
    for set in settings {
        let warned = logged(|| {
            let device = |autocast: Autocast| autocast.device(Device::flex()).unwrap();
            assert_eq!(device(set(Autocast::bf16())), device(Autocast::bf16()));
        });
        assert_eq!(warned.len(), 1, "{warned:?}");
        assert!(warned[0].contains("Begin with Autocast::fp8"), "{warned:?}");
        let fp8 = Autocast::fp8(CurrentScaling::new()).unwrap();
        assert_eq!(logged(|| drop(set(fp8))), [""; 0]);
    }
}

/// A guard is a layer of its own.
#[test]
fn a_guard_that_does_not_look_is_logged() {
    let guard = NanGuard::new();
    let guarded = || Autocast::bf16().nan_guard(&guard);
    let warned = logged(|| drop(guarded().layer(&Device::flex()).unwrap()));
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(warned[0].contains("put the guard over"), "{warned:?}");
    let looks = logged(|| drop(guarded().layers(Device::flex()).unwrap()));
    assert_eq!(looks, [""; 0]);
}
