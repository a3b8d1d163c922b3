//! What a device computes on its way to an element is not rounded to 16 bits: CubeCL's make many functions of parts.

use super::devices::cube_devices;
use burn::tensor::{Device, FloatDType, Tensor, activation};
use burn_amp::{Autocast, Policy};
use burn_layer::ops_come_whole;

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Plain devices with autocast over them, and the low dtype.
fn devices() -> Vec<(FloatDType, Device, Device)> {
    let plain = || [Device::flex()].into_iter().chain(cube_devices());
    let of = |policy: Policy| {
        let low = policy.low_dtype();
        let has_it = plain().filter(move |plain| plain.supports_dtype(low));
        has_it.map(move |plain| {
            let autocast = Autocast::new(policy.clone());
            (low, plain.clone(), autocast.device(plain).unwrap())
        })
    };
    let policies = [Policy::fp16(), Policy::bf16()];
    policies.into_iter().flat_map(of).collect()
}

/// How far two numbers next to each other are apart, as a share of them.
fn spacing(low: FloatDType) -> f32 {
    match low {
        FloatDType::F16 => 1.0 / 1024.0,
        _ => 1.0 / 128.0,
    }
}

type Apply = fn(Tensor<2>) -> Tensor<2>;

const FUNCTIONS: &[(&str, Apply)] = &[
    ("gelu", activation::gelu),
    ("leaky_relu", |x| activation::leaky_relu(x, 0.01)),
    ("hypot", |x| x.clone().hypot(x.flip([0]))),
    ("erf", Tensor::erf),
    ("asinh", Tensor::asinh),
    ("acosh", |x| x.abs().clamp_min(1.25).acosh()),
    ("atanh", |x| x.clamp(-0.75, 0.75).atanh()),
];

/// Beside Flex in f32, which has a kernel for each.
#[test]
fn functions_are_rounded_once() {
    let x = [0.001, 0.01, 0.3, 0.7, 1.3, 2.5, 3.7, 100.0];
    let x = x.into_iter().flat_map(|x| [x, -x]).collect::<Vec<f32>>();
    let on = |device: &Device| Tensor::<1>::from_floats(x.as_slice(), device).reshape([16, 1]);
    for (low, plain, autocast) in devices() {
        let one = Tensor::ones([1, 1], &autocast);
        // In bf16 `gelu` is as the device makes it: see the table of rules.
        let in_low = low == FloatDType::BF16 || !ops_come_whole();
        let as_stored = |name: &str| name == "gelu" && in_low;
        for (name, apply) in FUNCTIONS.iter().filter(|(name, _)| !as_stored(name)) {
            let stored = on(&Device::flex()).cast(low).cast(FloatDType::F32);
            let exact = values(apply(stored.clone()));
            let found = values(apply(on(&autocast).matmul(one.clone())));
            for ((x, found), exact) in values(stored).iter().zip(found).zip(exact) {
                // What CubeCL's functions are off by in f32 is less than half of that.
                let error = (found - exact).abs();
                assert!(
                    error <= spacing(low) * exact.abs() + 1e-6,
                    "{name}({x}) is {exact}, not {found}, in {low:?} on {plain:?}"
                );
            }
        }
    }
}

/// As PyTorch promotes them.
#[test]
fn a_function_of_two_numbers_keeps_the_digits_of_the_wider() {
    for (low, plain, autocast) in devices() {
        let on = |device: &Device| {
            let low = Tensor::<2>::from_floats([[100.0], [-3.25]], device);
            let low = low.matmul(Tensor::ones([1, 1], device));
            let wide = Tensor::<2>::from_floats([[6.2831855], [0.3]], device);
            [
                low.clone().remainder(wide.clone()),
                wide.clone().remainder(low.clone()),
                low.clone().hypot(wide.clone()),
                wide.hypot(low),
            ]
            .map(values)
        };
        for (found, exact) in on(&autocast).into_iter().zip(on(&plain)) {
            for (found, exact) in found.iter().zip(&exact) {
                let error = (found - exact).abs();
                assert!(
                    error <= 1e-5 * exact.abs() + 1e-5,
                    "{found} for {exact} in {low:?} on {plain:?}"
                );
            }
        }
    }
}

/// The cube of 41 is more than fp16 holds. (Burn's own derivative of `gelu` is another function than Flex's, off by 0.0004.)
#[test]
fn gelu_has_the_gradients_of_f32_in_fp16() {
    if !ops_come_whole() {
        return println!("SKIPPED: with Burn's own fusion, its client sends this op in parts");
    }
    for (low, plain, autocast) in devices() {
        if low != FloatDType::F16 {
            continue;
        }
        let [exact, found] = [plain.clone(), autocast].map(|device| {
            let device = device.autodiff();
            let x = Tensor::<2>::from_floats([[41.0], [-41.0], [-3.0], [0.5]], &device);
            let x = x.require_grad();
            let one = || Tensor::ones([1, 1], &device);
            let y = activation::gelu(x.clone().matmul(one())).matmul(one());
            let gradients = y.sum().backward();
            values(x.grad(&gradients).unwrap())
        });
        for (found, exact) in found.iter().zip(&exact) {
            assert!(
                (found - exact).abs() <= spacing(low) * exact.abs(),
                "{found} for {exact} in {low:?} on {plain:?}"
            );
        }
    }
}
