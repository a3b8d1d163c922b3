//! Dropout, `silu` and gates, which Burn sends as products: as in PyTorch, what is low stays low.

use burn::{
    nn::{DropoutConfig, Linear, LinearConfig, SwiGluConfig},
    tensor::{
        DType, Device, Distribution, FloatDType, Tensor,
        activation::{gelu_approximate, glu, hard_sigmoid, sigmoid, silu},
    },
};
use burn_amp::{Autocast, Op, Policy, Rule, full_precision};
use burn_layer::{Layer, Layers, Lease, Made, ops_come_whole};
use std::sync::{Arc, Mutex};

/// Writes down what elementwise products, and random numbers, are stored in.
#[derive(Clone, Debug, Default)]
struct Products(Arc<Mutex<Vec<(Op, DType)>>>);

impl Layer for Products {
    fn watches(&self) -> bool {
        true
    }

    fn made(&self, made: &Made<'_>) {
        if matches!(made.op, Op::float_mul | Op::float_random) {
            let stored = (made.op, made.output.dtype());
            self.0.lock().unwrap().push(stored);
        }
    }
}

impl Products {
    fn over(autocast: Autocast) -> (Self, Lease) {
        let (products, plain) = (Self::default(), Device::flex());
        let layers = Layers::on(plain.clone()).layer(autocast.layer(&plain).unwrap());
        let lease = layers.layer(products.clone()).lease().unwrap();
        (products, lease)
    }

    /// Those of `body`.
    fn of<R>(&self, device: &Device, body: impl FnOnce() -> R) -> (R, Vec<DType>) {
        self.of_op(Op::float_mul, device, body)
    }

    fn of_op<R>(&self, op: Op, device: &Device, body: impl FnOnce() -> R) -> (R, Vec<DType>) {
        device.sync().unwrap();
        self.0.lock().unwrap().clear();
        let result = body();
        device.sync().unwrap();
        let stored = core::mem::take(&mut *self.0.lock().unwrap());
        let of_op = stored.into_iter().filter(|(of, _)| *of == op);
        (result, of_op.map(|(_, dtype)| dtype).collect())
    }
}

/// An activation, which is stored in bf16.
fn activation(device: &Device) -> Tensor<2> {
    let linear: Linear = LinearConfig::new(8, 16).init(device);
    let x = Tensor::random([64, 8], Distribution::Normal(0.0, 2.0), device);
    linear.forward(x)
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().into_data().try_to_vec().unwrap()
}

/// The nearest number that bf16 has, which is the upper half of an f32.
fn low(value: f32) -> f32 {
    let bits = value.to_bits();
    let half = 0x7fff + (bits >> 16 & 1);
    f32::from_bits((bits + half) & 0xffff_0000)
}

#[test]
fn dropout_keeps_activations_low_and_rounds_them_once() {
    let (products, lease) = Products::over(Autocast::bf16());
    let device = lease.device().autodiff();
    let x = activation(&device);
    let dropout = DropoutConfig::new(0.3).init();
    let (dropped, stored) = products.of(&device, || dropout.forward(x.clone()));
    assert_eq!(stored, [DType::BF16]);
    let (before, after) = (values(&x), values(&dropped));
    let kept = after.iter().filter(|value| **value != 0.0).count();
    assert!(
        (0.6..0.8).contains(&(kept as f64 / after.len() as f64)),
        "{kept}"
    );
    for (before, after) in before.into_iter().zip(after) {
        assert!(
            after == 0.0 || after == low(before * (1.0 / 0.7)),
            "{before} {after}"
        );
    }
}

/// Backward needs a mask, so it takes half the memory. What else is done with it is in f32.
#[test]
fn masks_are_stored_low_and_are_f32_all_the_same() {
    let (products, lease) = Products::over(Autocast::bf16());
    let device = lease.device();
    let x = activation(&device);
    let draw = |distribution| move |x: &Tensor<2>| x.random_like(distribution);
    let stored = |distribution| {
        let draw = || draw(distribution)(&x);
        products.of_op(Op::float_random, &device, draw).1
    };
    assert_eq!(stored(Distribution::Bernoulli(0.7)), [DType::BF16]);
    assert_eq!(stored(Distribution::Default), [DType::F32]);
    let full = || full_precision(|| x.random_like(Distribution::Bernoulli(0.7)));
    assert_eq!(
        products.of_op(Op::float_random, &device, full).1,
        [DType::F32]
    );

    let mask = x.random_like(Distribution::Bernoulli(0.7));
    assert_eq!(mask.dtype(), DType::F32);
    let drawn = values(&mask);
    assert!(drawn.iter().all(|value| [0.0, 1.0].contains(value)));
    // bf16 has none of these.
    let scaled = [
        mask.clone() * 0.3,
        mask.clone() / 0.7 - 0.1,
        mask.clone().reshape([16, 64]).reshape([64, 16]) * 0.3,
        mask.clone().transpose().transpose() * Tensor::full([64, 16], 0.3, &device),
        mask.clone().powf_scalar(2.0) + 0.0001,
    ];
    let exact: [fn(f32) -> f32; 5] = [
        |one| one * 0.3,
        |one| one / 0.7 - 0.1,
        |one| one * 0.3,
        |one| one * 0.3,
        |one| one + 0.0001,
    ];
    for (at, (found, exact)) in scaled.iter().zip(exact).enumerate() {
        for (found, one) in values(found).into_iter().zip(&drawn) {
            assert!((found - exact(*one)).abs() < 1e-6, "{at}: {found} of {one}");
        }
    }
    let count = drawn.iter().sum::<f32>();
    assert_eq!(mask.sum().into_scalar::<f32>(), count);

    // As those that a comparison gives are.
    let (_, stored) = products.of(&device, || {
        x.clone() * x.clone().greater_scalar(0.0).float()
    });
    assert_eq!(stored, [DType::BF16]);
}

#[test]
fn silu_and_gates_keep_activations_low() {
    let (products, lease) = Products::over(Autocast::bf16());
    let device = lease.device();
    let x = activation(&device);
    let (product, stored) = products.of(&device, || silu(x.clone()));
    assert_eq!(stored, [DType::BF16]);
    for (x, y) in values(&x).into_iter().zip(values(&product)) {
        let exact = f64::from(x) / (1.0 + (-f64::from(x)).exp());
        // Half of a last place, which bf16 has seven bits before.
        let error = (f64::from(y) - exact).abs();
        assert!(
            error <= exact.abs() * 2f64.powi(-8) * 1.001,
            "{x}: {y}, {exact}"
        );
    }
    let gates: [&dyn Fn() -> Tensor<2>; 3] = [
        &|| glu(x.clone(), 1),
        &|| sigmoid(x.clone()) * x.clone(),
        // Squeeze and excitation, whose gate is one number a channel.
        &|| {
            let gate = sigmoid(x.clone().narrow(0, 0, 1)).reshape([16]);
            x.clone() * gate.unsqueeze()
        },
    ];
    for gate in gates {
        assert_eq!(products.of(&device, gate).1, [DType::BF16]);
    }
    let swiglu = SwiGluConfig::new(16, 32).init(&device);
    let (_, stored) = products.of(&device, || swiglu.forward(x.clone()));
    assert_eq!(stored, [DType::BF16; 2]);
}

/// The activation of GPT-2, which Burn computes by a tanh. PyTorch's stays low, too.
#[test]
fn an_approximate_gelu_keeps_activations_low() {
    let (products, lease) = Products::over(Autocast::bf16());
    for device in [lease.device(), lease.device().autodiff()] {
        let x = activation(&device);
        let (product, stored) = products.of(&device, || gelu_approximate(x.clone()));
        assert_eq!(stored, [DType::BF16]);
        for (x, y) in values(&x).into_iter().zip(values(&product)) {
            let x = f64::from(x);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            let exact = 0.5 * x * (1.0 + inner.tanh());
            // Half of a last place of bf16, and what the sum with 1 loses in f32.
            let error = (f64::from(y) - exact).abs();
            let most = exact.abs() * 2f64.powi(-8) * 1.001 + x.abs() * 2f64.powi(-23);
            assert!(error <= most, "{x}: {y}, {exact}");
        }
        // Only where one is added.
        let other = || x.clone() * (x.clone().powf_scalar(3.0).tanh() + 2.0);
        assert_eq!(products.of(&device, other).1, [DType::F32]);
    }
}

/// Gradients of what is low are low.
#[test]
fn so_do_their_gradients() {
    let (products, lease) = Products::over(Autocast::bf16().recompute(false));
    let device = lease.device().autodiff();
    let weight = Tensor::<2>::ones([16, 16], &device).require_grad();
    let of = |y: Tensor<2>| {
        let loss = y.matmul(weight.clone()).sum();
        products.of(&device, || loss.backward()).1
    };
    // The first is the sum's.
    let dropout = DropoutConfig::new(0.3).init();
    assert_eq!(
        of(dropout.forward(activation(&device))),
        [DType::F32, DType::BF16]
    );
    // By the sigmoid and by the input; and in the sigmoid's own gradient, where it comes in parts.
    let stored = of(silu(activation(&device)));
    assert_eq!(stored[..3], [DType::F32, DType::BF16, DType::BF16]);
    assert_eq!(stored.len(), if ops_come_whole() { 3 } else { 5 });
}

#[test]
fn what_is_not_low_stays_as_it_is() {
    let (products, lease) = Products::over(Autocast::bf16());
    let device = lease.device();
    let low = activation(&device);
    let wide = Tensor::<2>::random([64, 16], Distribution::Default, &device);
    let mask = || wide.random_like(Distribution::Bernoulli(0.5));
    let all: [(&str, &dyn Fn() -> Tensor<2>); 7] = [
        ("wide input", &|| wide.clone() * mask()),
        ("wide gate", &|| silu(wide.clone())),
        ("two masks", &|| mask() * mask()),
        // Nothing says that 1 / 0.9 times an activation can be low.
        ("scaled mask", &|| low.clone() * (mask() * (1.0 / 0.9))),
        ("complement", &|| low.clone() * (1.0 - sigmoid(low.clone()))),
        ("noise", &|| {
            low.clone() * low.random_like(Distribution::Default)
        }),
        ("region", &|| full_precision(|| silu(low.clone()))),
    ];
    for (name, product) in all {
        assert_eq!(products.of(&device, product).1, [DType::F32], "{name}");
    }
    // Another function, which is low itself where it comes whole.
    if ops_come_whole() {
        let product = || low.clone() * hard_sigmoid(low.clone(), 0.2, 0.5);
        assert_eq!(products.of(&device, product).1, [DType::BF16]);
    }
}

#[test]
fn a_policys_own_rule_holds() {
    let policy = Policy::builder(FloatDType::BF16).rule(Op::float_mul, Rule::Full);
    let (products, lease) = Products::over(Autocast::new(policy.build()));
    let device = lease.device();
    let x = activation(&device).matmul(Tensor::ones([16, 16], &device));
    assert_eq!(products.of(&device, || silu(x.clone())).1, [DType::F32]);
}
