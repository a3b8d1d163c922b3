//! Synchronized batch normalization against PyTorch's batch normalization of the whole batch.

mod calls;
mod plain;
mod running;

use burn::{
    nn::BatchNormConfig,
    tensor::{DType, Device, Tensor, TensorData},
};
use burn_ddp::{ProcessGroup, SyncBatchNorm, with_custom_ops};
use burn_layer::{Layer, Layers};
use serde::Deserialize;

use crate::suite::{
    devices::cube_devices,
    ranks::{locally, over_tcp},
};

#[derive(Deserialize)]
struct Case {
    shards: Vec<usize>,
    shape: Vec<usize>,
    eps: f64,
    momentum: f64,
    gamma: Vec<f64>,
    beta: Vec<f64>,
    x: Vec<f64>,
    y: Vec<f64>,
    dy: Vec<f64>,
    dx: Vec<f64>,
    dgamma: Vec<f64>,
    dbeta: Vec<f64>,
    running_mean: Vec<f64>,
    batch_var_biased: Vec<f64>,
}

fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("../../fixtures/sync_batch_norm.json")).unwrap()
}

pub(crate) fn tensor<const D: usize>(
    values: &[f64],
    shape: [usize; D],
    dtype: DType,
    device: &Device,
) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, dtype))
}

/// A rank's share of values whose first dimension is the batch.
fn share<'a>(case: &Case, values: &'a [f64], rank: usize) -> &'a [f64] {
    let sample: usize = case.shape[1..].iter().product();
    let start: usize = case.shards[..rank].iter().sum();
    &values[start * sample..][..case.shards[rank] * sample]
}

pub(crate) fn close(actual: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (index, (a, b)) in actual.iter().zip(expected).enumerate() {
        assert!(
            (a - b).abs() <= tolerance * b.abs().max(1.0),
            "{what}[{index}]: {a} != {b}"
        );
    }
}

struct Outcome {
    y: Vec<f64>,
    dx: Vec<f64>,
    dgamma: Vec<f64>,
    dbeta: Vec<f64>,
    running_mean: Vec<f64>,
    running_var: Vec<f64>,
}

pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

fn norm(case: &Case, group: &ProcessGroup, dtype: DType, device: &Device) -> SyncBatchNorm {
    let channels = case.shape[1];
    let config = BatchNormConfig::new(channels)
        .with_epsilon(case.eps)
        .with_momentum(case.momentum);
    let mut norm = config.init(device);
    norm.gamma = norm
        .gamma
        .map(|_| tensor(&case.gamma, [channels], dtype, device).require_grad());
    norm.beta = norm
        .beta
        .map(|_| tensor(&case.beta, [channels], dtype, device).require_grad());
    SyncBatchNorm::new(&norm, group)
}

fn run<const D: usize>(
    case: &Case,
    group: &ProcessGroup,
    dtype: DType,
    device: &Device,
) -> Outcome {
    let rank = group.rank();
    let mut shape: [usize; D] = case.shape.clone().try_into().unwrap();
    shape[0] = case.shards[rank];
    let norm = norm(case, group, dtype, device);
    let x = tensor(share(case, &case.x, rank), shape, dtype, device).require_grad();
    let dy = tensor(share(case, &case.dy, rank), shape, dtype, device);
    let y = norm.forward(x.clone());
    assert_eq!((y.dims(), y.dtype()), (shape, dtype));
    let grads = (y.clone() * dy).sum().backward();
    Outcome {
        y: values(y),
        dx: values(x.grad(&grads).unwrap()),
        dgamma: values(norm.gamma.grad(&grads).unwrap()),
        dbeta: values(norm.beta.grad(&grads).unwrap()),
        running_mean: values(norm.running_mean.value_sync()),
        running_var: values(norm.running_var.value_sync()),
    }
}

fn check(dtype: DType, tolerance: f64, device: &Device, tcp: bool) {
    for case in cases() {
        let body = |group: ProcessGroup| match case.shape.len() {
            3 => run::<3>(&case, &group, dtype, device),
            4 => run::<4>(&case, &group, dtype, device),
            rank => panic!("a case of rank {rank}"),
        };
        let world_size = case.shards.len();
        let ranks = match tcp {
            true => over_tcp(world_size, 1, body),
            false => locally(world_size, body),
        };
        // The running statistics are f32 whatever the input is.
        let running = tolerance.max(1e-6);
        for (rank, outcome) in ranks.iter().enumerate() {
            close(&outcome.y, share(&case, &case.y, rank), tolerance, "y");
            close(&outcome.dx, share(&case, &case.dx, rank), tolerance, "dx");
            close(
                &outcome.running_mean,
                &case.running_mean,
                running,
                "running mean",
            );
            let running_var: Vec<f64> = case
                .batch_var_biased
                .iter()
                .map(|batch| 1.0 - case.momentum + case.momentum * batch)
                .collect();
            close(
                &outcome.running_var,
                &running_var,
                running,
                "running variance",
            );
        }
        let sum = |of: fn(&Outcome) -> &[f64]| -> Vec<f64> {
            let channels = 0..case.shape[1];
            channels
                .map(|channel| ranks.iter().map(|rank| of(rank)[channel]).sum())
                .collect()
        };
        close(
            &sum(|it| &it.dgamma),
            &case.dgamma,
            tolerance * 4.0,
            "dgamma",
        );
        close(&sum(|it| &it.dbeta), &case.dbeta, tolerance * 4.0, "dbeta");
    }
}

#[test]
fn it_is_batch_norm_of_the_whole_batch() {
    let device = Device::flex().autodiff();
    assert!(cases().iter().any(|case| case.shards.contains(&0)));
    assert!(cases().iter().any(|case| case.shards.contains(&1)));
    check(DType::F32, 2e-5, &device, true);
    check(DType::F64, 1e-10, &device, false);
}

#[test]
fn it_runs_on_layered_devices() {
    #[derive(Debug)]
    struct Nothing;
    impl Layer for Nothing {}

    let served = || {
        let layers = Layers::on(Device::flex().autodiff()).layer(Nothing);
        with_custom_ops(layers).serve().unwrap()
    };
    let device = served();
    for case in cases() {
        // One device each: ranks that share one would wait for each other on its only thread.
        let ranks = locally(case.shards.len(), |group| {
            let device = match group.is_main() {
                true => device.clone(),
                false => served(),
            };
            match case.shape.len() {
                3 => run::<3>(&case, &group, DType::F32, &device),
                _ => run::<4>(&case, &group, DType::F32, &device),
            }
        });
        for (rank, outcome) in ranks.iter().enumerate() {
            close(&outcome.y, share(&case, &case.y, rank), 2e-5, "y");
            close(&outcome.dx, share(&case, &case.dx, rank), 2e-5, "dx");
        }
    }
}

#[test]
fn it_runs_on_cubecl() {
    for device in cube_devices() {
        check(DType::F32, 2e-5, &device.autodiff(), false);
    }
}

fn sample(device: &Device) -> Tensor<3> {
    let values: Vec<f64> = (0..24).map(|index| f64::from(index * index % 11)).collect();
    tensor(&values, [4, 2, 3], DType::F32, device)
}

#[test]
fn it_trains_under_gradient_checkpointing() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    check(DType::F32, 2e-5, &device, false);
}

fn layered() -> Device {
    let layers = with_custom_ops(Layers::on(Device::flex()));
    layers.serve().unwrap().autodiff()
}
