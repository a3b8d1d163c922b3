//! The dtypes of tensors that are made without one.

use super::child;
use burn::tensor::{DType, Device, FloatDType, Int, IntDType, Tensor};
use burn_layer::{Layer, Layers, Lease};

#[derive(Debug)]
struct Nothing;
impl Layer for Nothing {}

fn lease() -> Lease {
    Layers::on(Device::flex()).layer(Nothing).lease().unwrap()
}

fn dtypes(device: &Device) -> [DType; 2] {
    let floats = Tensor::<1>::zeros([1], device);
    [floats.dtype(), Tensor::<1, Int>::zeros([1], device).dtype()]
}

/// In a process of its own: a device is configured once, before it is used.
#[test]
fn they_are_those_of_the_device_underneath() {
    let test = "suite::settings::they_are_those_of_the_device_underneath";
    if child::of(test, |_| {}) {
        return;
    }
    let before = lease();
    let own = dtypes(&before.device());
    let mut plain = Device::flex();
    let wide = (FloatDType::F64, IntDType::I64);
    plain.configure(wide).unwrap();
    assert_eq!(dtypes(&lease().device()), [DType::F64, DType::I64]);
    // The service of one from before is nobody's then.
    drop(before);
    assert_ne!(own, [DType::F64, DType::I64]);
    assert_eq!(dtypes(&lease().device()), [DType::F64, DType::I64]);
}

#[test]
fn a_device_does_not_have_those_of_the_one_before() {
    let test = "suite::settings::a_device_does_not_have_those_of_the_one_before";
    if child::of(test, |_| {}) {
        return;
    }
    let plain = dtypes(&Device::flex());
    let first = lease();
    let narrow = (FloatDType::F16, IntDType::I64);
    first.device().configure(narrow).unwrap();
    assert_eq!(dtypes(&first.device()), [DType::F16, DType::I64]);
    drop(first);
    assert_eq!(dtypes(&lease().device()), plain);
}
