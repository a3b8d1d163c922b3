//! Casts of parameters, on a backend that fuses ops: where an optimizer computes them.

use super::devices::{Leased, devices_and_cpu};
use burn::tensor::{DType, Device, Tensor};
use burn_layer::{Cast, Inputs, Layer, Layers, Op, Plan};
use std::sync::{Arc, Mutex};

/// Products in bf16, stored in f32. Writes down the casts to it of matrices of `ELEMENTS`, and whether an earlier cast was used.
#[derive(Clone, Debug, Default)]
struct Low(Arc<Mutex<Vec<bool>>>);

const SIDE: usize = 6;
const ELEMENTS: usize = SIDE * SIDE;

impl Layer for Low {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        Some(match op {
            Op::float_matmul => Plan::compute(DType::BF16).store(DType::F32),
            _ => inputs.promote(),
        })
    }

    fn cast(&self, cast: Cast) {
        if (cast.to, cast.elements) == (DType::BF16, ELEMENTS) {
            self.0.lock().unwrap().push(cast.saved);
        }
    }
}

impl Low {
    fn take(&self, device: &Device) -> Vec<bool> {
        device.sync().unwrap();
        core::mem::take(&mut self.0.lock().unwrap())
    }
}

/// The devices that have bf16, each under `Low`.
fn devices() -> Vec<(Device, Device, Low)> {
    let mut devices = Vec::new();
    for plain in devices_and_cpu() {
        if !plain.supports_dtype(DType::BF16) {
            println!("SKIPPED: {plain:?} has no bf16");
            continue;
        }
        let layer = Low::default();
        let device = Layers::on(plain.clone()).layer(layer.clone()).leased();
        devices.push((plain, device, layer));
    }
    devices
}

fn fuses(device: &Device) -> bool {
    cfg!(feature = "fusion") && *device != Device::flex()
}

fn matrix(first: usize, device: &Device) -> Tensor<2> {
    let numbers = (first..first + ELEMENTS).map(|it| (it * 7 % 23) as f32 / 16.0 - 0.5);
    let numbers: Vec<f32> = numbers.collect();
    Tensor::<1>::from_floats(numbers.as_slice(), device).reshape([SIDE, SIDE])
}

fn product(x: &Tensor<2>, weight: &Tensor<2>) -> Vec<f32> {
    let product = x.clone().matmul(weight.clone());
    product.into_data().try_to_vec().unwrap()
}

#[test]
fn a_step_casts_what_forward_will_need() {
    for (plain, device, layer) in devices() {
        // One row, so that no other tensor has the weight's size.
        let x = matrix(3, &device).slice(0..1);
        let gradient = matrix(11, &device);
        let mut weight = matrix(0, &device);
        // The steps of SGD, and of AdamW, which takes two differences. The first of these is no one's to cast, but may be.
        let steps: [fn(Tensor<2>, Tensor<2>) -> Tensor<2>; 2] = [
            |weight, delta| weight - delta.mul_scalar(0.125),
            |weight, delta| {
                let decayed = weight.clone() - weight.mul_scalar(0.0625);
                decayed - delta.mul_scalar(0.125)
            },
        ];
        layer.take(&device);
        product(&x, &weight);
        assert_eq!(layer.take(&device), [false], "{plain:?}");
        for step in steps {
            weight = step(weight, gradient.clone());
            let ahead = layer.take(&device);
            assert_eq!(!ahead.is_empty(), fuses(&plain), "{plain:?}");
            assert!(ahead.iter().all(|saved| !saved));
            let found = product(&x, &weight);
            assert_eq!(layer.take(&device), [fuses(&plain)], "{plain:?}");
            // The copy is of the new weight.
            let fresh = Tensor::from_data(weight.to_data(), &device);
            assert_eq!(found, product(&x, &fresh), "{plain:?}");
            layer.take(&device);
        }
    }
}

#[test]
fn what_was_not_cast_is_not_cast_ahead() {
    for (plain, device, layer) in devices() {
        let weight = matrix(0, &device);
        let moved = weight.clone() - matrix(5, &device);
        assert_eq!(layer.take(&device), [false; 0], "{plain:?}");
        // The result of a product has a copy too, but is no parameter.
        let activation = weight.clone().matmul(weight);
        layer.take(&device);
        let used = activation.clone().matmul(activation.clone());
        assert!(layer.take(&device).contains(&false), "{plain:?}");
        let sum = activation.clone() + moved;
        assert_eq!(layer.take(&device), [false; 0], "{plain:?}");
        drop((activation, used, sum));
    }
}
