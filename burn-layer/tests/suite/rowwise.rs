//! What tests of softmaxes, normalizations of rows and rotations share.

use super::devices::{Leased, devices_and_cpu, exact};
use burn::tensor::{DType, Device, Tensor};
use burn_layer::{Inputs, Layer, Layers, Op, Plan};
use std::sync::{Arc, Mutex};

/// Products in 16 bits, and sums, means and softmaxes in f32, as autocast has them, or nothing changed. Writes down what is computed later than it was
/// called.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mixed {
    pub(crate) low: Option<DType>,
    pub(crate) later: Arc<Mutex<Vec<Op>>>,
}

impl Layer for Mixed {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        let low = self.low?;
        Some(match op {
            Op::float_matmul => Plan::compute(low),
            Op::float_max_dim
            | Op::float_sum_dim
            | Op::float_sum_dims
            | Op::float_mean_dim
            | Op::float_exp
            | Op::float_log => Plan::compute(DType::F32),
            _ if inputs.shifted => Plan::compute(DType::F32),
            _ => inputs.promote(),
        })
    }

    fn recomputed(&self, op: Op) {
        self.later.lock().unwrap().push(op);
    }
}

impl Mixed {
    pub(crate) fn device(&self, plain: &Device) -> Device {
        let layers = Layers::on(plain.clone()).layer(self.clone());
        layers.leased()
    }
}

/// Every device with each of the dtypes of products, and a layer for it.
pub(crate) fn cases() -> Vec<(Device, Mixed)> {
    cases_of(devices_and_cpu())
}

pub(crate) fn cases_of(devices: Vec<Device>) -> Vec<(Device, Mixed)> {
    let mut cases = Vec::new();
    for plain in devices {
        for low in [None, Some(DType::BF16), Some(DType::F16)] {
            if let Some(dtype) = low.filter(|dtype| !plain.supports_dtype(*dtype)) {
                println!("SKIPPED: {plain:?} has no {dtype:?}");
                continue;
            }
            let layer = Mixed {
                low,
                ..Mixed::default()
            };
            cases.push((plain.clone(), layer));
        }
    }
    cases
}

/// Quarters, which all dtypes hold.
pub(crate) fn numbers(count: usize, step: usize) -> Vec<f32> {
    let number = |place: usize| ((place * step + place / 5) % 23) as f32 / 4.0 - 3.0;
    (0..count).map(number).collect()
}

/// The product of a leaf and the identity: an activation, which is equal to the leaf.
pub(crate) fn activation<const D: usize>(leaf: &Tensor<D>) -> Tensor<D> {
    let (dims, device) = (leaf.dims(), leaf.device());
    let last = dims[D - 1];
    let rows = dims.iter().product::<usize>() / last;
    let matrix = leaf.clone().reshape([rows, last]);
    let product = match last < 100 {
        true => matrix.matmul(Tensor::eye(last, &device)),
        false => Tensor::eye(rows, &device).matmul(matrix),
    };
    product.reshape(dims)
}

pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    let data = tensor.into_data().convert::<f64>();
    data.try_to_vec().unwrap()
}

pub(crate) fn wide(numbers: Vec<f32>) -> Vec<f64> {
    numbers.into_iter().map(f64::from).collect()
}

/// The largest difference, relative to the largest value.
pub(crate) fn difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected
        .iter()
        .fold(1e-3, |largest: f64, it| largest.max(it.abs()));
    let pairs = found.iter().zip(expected);
    pairs.fold(0.0, |most: f64, (a, b)| most.max((a - b).abs())) / largest
}

/// How exact results are that are stored in the dtype of products.
pub(crate) fn rounded(plain: &Device, layer: &Mixed) -> f64 {
    match layer.low {
        None => exact(plain),
        Some(DType::F16) => 1.0 / 1024.0,
        _ => 1.0 / 128.0,
    }
}

/// Checks what `uses` computes in f32 on layered devices against the plain device.
pub(crate) fn check_f32(uses: fn(&Device) -> Vec<Vec<f64>>, most: f64) {
    let expected = uses(&Device::flex().autodiff());
    for plain in devices_and_cpu() {
        let device = Mixed::default().device(&plain).autodiff();
        for (which, (found, expected)) in uses(&device).iter().zip(&expected).enumerate() {
            let difference = difference(found, expected);
            let most = exact(&plain).max(most);
            assert!(difference < most, "{plain:?}, {which}: {difference}");
        }
    }
}

/// Checks what `network` computes on layered devices, with products in every dtype, against the plain device: to so many roundings.
pub(crate) fn check_network(network: fn(&Device) -> Vec<Vec<f64>>, roundings: f64) {
    let expected = network(&Device::flex().autodiff());
    for (plain, layer) in cases() {
        let found = network(&layer.device(&plain).autodiff());
        for (which, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let found = difference(found, expected);
            let most = roundings * rounded(&plain, &layer);
            assert!(found < most, "{plain:?}, {:?}, {which}: {found}", layer.low);
        }
    }
}

/// Where ops are fused, checks that the backward of a program's loss computes nothing by itself that its kernels leave out, and nothing
/// of forward once more. The program returns a leaf, too.
pub(crate) fn check_nothing_later<const D: usize>(
    program: impl Fn(&Device) -> (Tensor<D>, Tensor<1>),
) {
    for (plain, layer) in cases() {
        let fuses = cfg!(feature = "fusion") && plain != Device::flex();
        if !fuses {
            continue;
        }
        let device = layer.device(&plain).autodiff();
        let (leaf, loss) = program(&device);
        device.sync().unwrap();
        layer.later.lock().unwrap().clear();
        leaf.grad(&loss.backward()).unwrap().into_data();
        let later = core::mem::take(&mut *layer.later.lock().unwrap());
        assert_eq!(later, [], "{plain:?}, {:?}", layer.low);
    }
}
