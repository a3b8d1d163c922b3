//! Synchronized batch normalization on autocast devices, beside Burn's own of the whole batch.

use burn::{
    module::Param,
    nn::{BatchNorm, BatchNormConfig},
    tensor::{DType, Device, Tensor, TensorData},
};
use burn_amp::{Autocast, full_precision};
use burn_ddp::{Norm, SyncBatchNorm, with_custom_ops};
use burn_layer::Layer;
use std::sync::{Arc, Mutex};

use crate::suite::{
    devices::cube_devices,
    ranks::locally,
    sync_batch_norm::{close, values},
};

/// Writes down in which dtypes results are stored, and how many elements they have.
#[derive(Clone, Debug, Default)]
struct Stored(Arc<Mutex<Vec<(DType, usize)>>>);

impl Layer for Stored {
    fn stored(&self, dtype: DType, _nominal: DType, elements: usize) {
        self.0.lock().unwrap().push((dtype, elements));
    }
}

/// A device with autocast in `low`.
fn device(plain: &Device, low: DType, stored: &Stored) -> Device {
    let autocast = match low {
        DType::BF16 => Autocast::bf16(),
        _ => Autocast::fp16(),
    };
    let layers = autocast.layers(plain.clone()).unwrap();
    let layers = with_custom_ops(layers.layer(stored.clone()));
    layers.serve().unwrap().autodiff()
}

const CHANNELS: usize = 3;

/// Numbers that 16 bits hold, `[batch, CHANNELS, 4]`.
fn numbers(batch: std::ops::Range<usize>, step: usize, device: &Device) -> Tensor<3> {
    let sample = 4 * CHANNELS;
    let dims = [batch.len(), CHANNELS, 4];
    let places = batch.start * sample..batch.end * sample;
    let numbers: Vec<f32> = places
        .map(|place| ((place * step + place / 5) % 23) as f32 - 8.0)
        .collect();
    Tensor::from_data(TensorData::new(numbers, dims), device)
}

fn batch_norm(device: &Device) -> BatchNorm {
    let mut norm = BatchNormConfig::new(CHANNELS).init(device);
    let parameter = |numbers: [f32; CHANNELS]| {
        Param::from_tensor(Tensor::<1>::from_floats(numbers, device).require_grad())
    };
    norm.gamma = parameter([1.5, -0.5, 2.0]);
    norm.beta = parameter([0.25, 1.0, -3.0]);
    norm
}

/// Output, gradients of input, gamma and beta, and the running mean and variance.
type Results = [Vec<f64>; 6];

/// A step with the samples `batch`.
fn step<N: Norm>(
    norm: &N,
    parameters: [&Param<Tensor<1>>; 2],
    running: impl Fn() -> [Vec<f64>; 2],
    batch: std::ops::Range<usize>,
    device: &Device,
) -> Results {
    let leaf = numbers(batch.clone(), 7, device).require_grad();
    // A product with the identity: an activation, which autocast stores in 16 bits.
    let x = leaf.clone().matmul(Tensor::eye(4, device).unsqueeze());
    let output = norm.forward(x);
    assert_eq!(output.dtype(), DType::F32);
    let loss = (output.clone() * numbers(batch, 5, device)).sum();
    let gradients = loss.backward();
    let [gamma, beta] = parameters.map(|it| values(it.grad(&gradients).unwrap()));
    let [mean, variance] = running();
    [
        values(output),
        values(leaf.grad(&gradients).unwrap()),
        gamma,
        beta,
        mean,
        variance,
    ]
}

/// The same of the whole batch, by Burn's norm on a plain device.
fn expected(batch: usize) -> Results {
    let device = Device::flex().autodiff();
    let norm = batch_norm(&device);
    let running = || [&norm.running_mean, &norm.running_var].map(|it| values(it.value_sync()));
    step(&norm, [&norm.gamma, &norm.beta], running, 0..batch, &device)
}

/// The shares of three ranks, and how often results of a share's size were stored in `low`.
fn synchronized(plain: &Device, low: DType, shares: [usize; 3]) -> Vec<(Results, usize)> {
    locally(shares.len(), |group| {
        let stored = Stored::default();
        let device = device(plain, low, &stored);
        let norm = SyncBatchNorm::new(&batch_norm(&device), &group);
        let start: usize = shares[..group.rank()].iter().sum();
        let share = shares[group.rank()];
        let running = || [&norm.running_mean, &norm.running_var].map(|it| values(it.value_sync()));
        let parameters = [&norm.gamma, &norm.beta];
        let results = step(&norm, parameters, running, start..start + share, &device);
        let stored = stored.0.lock().unwrap();
        let elements = share * CHANNELS * 4;
        let stored_low = stored.iter().filter(|it| **it == (low, elements));
        (results, stored_low.count())
    })
}

fn check(plain: &Device, low: DType) {
    if !plain.supports_dtype(low) {
        println!("SKIPPED: {plain:?} has no {low:?}");
        return;
    }
    let shares = [2, 3, 17];
    let batch = shares.iter().sum();
    let expected = expected(batch);
    let ranks = synchronized(plain, low, shares);
    let rounding = match low {
        DType::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    };
    for (of, what) in ["output", "gradient of the input"].into_iter().enumerate() {
        let found: Vec<f64> = ranks.iter().flat_map(|(it, _)| it[of].clone()).collect();
        // Some numbers are rounded more than once on their way.
        close(&found, &expected[of], 4.0 * rounding, what);
    }
    for (of, what) in [(2, "gradient of gamma"), (3, "gradient of beta")] {
        let sum = |channel| ranks.iter().map(|(it, _)| it[of][channel]).sum();
        let sums: Vec<f64> = (0..CHANNELS).map(sum).collect();
        close(&sums, &expected[of], 1e-4, what);
    }
    for (results, stored_low) in &ranks {
        close(&results[4], &expected[4], 1e-5, "running mean");
        close(&results[5], &expected[5], 1e-5, "running variance");
        // The product, the output and the gradient of the input. The gradient of the product may be another.
        assert!((3..=4).contains(stored_low), "{plain:?}: {stored_low}");
    }
}

#[test]
fn output_and_gradient_are_stored_in_16_bits_and_statistics_are_of_f32() {
    for low in [DType::BF16, DType::F16] {
        check(&Device::flex(), low);
    }
}

#[test]
fn so_they_are_on_cubecl() {
    for plain in cube_devices() {
        check(&plain, DType::BF16);
    }
}

#[test]
fn in_full_precision_the_output_is_not_rounded() {
    let expected = expected(4);
    let found = locally(2, |group| {
        let device = device(&Device::flex(), DType::BF16, &Stored::default());
        let norm = SyncBatchNorm::new(&batch_norm(&device), &group);
        let start = 2 * group.rank();
        let x = numbers(start..start + 2, 7, &device);
        let x = x.matmul(Tensor::eye(4, &device).unsqueeze());
        values(full_precision(|| norm.forward(x)))
    });
    close(&found.concat(), &expected[0], 1e-5, "output");
}
