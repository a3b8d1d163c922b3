//! Synchronized batch normalization against PyTorch's batch normalization of the whole batch.

use burn::{
    module::Module,
    nn::{BatchNorm, BatchNormConfig},
    tensor::{DType, Device, Tensor, TensorData, Tolerance},
};
use burn_ddp::{DdpError, ProcessGroup, SyncBatchNorm, with_custom_ops};
use burn_layer::{Layer, Layers};
use serde::Deserialize;
use std::time::Duration;

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
    serde_json::from_str(include_str!("../fixtures/sync_batch_norm.json")).unwrap()
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
fn alone_frozen_and_in_evaluation_it_is_batch_norm() {
    let device = Device::flex().autodiff();
    let plain = BatchNormConfig::new(2).init(&device);
    let single = SyncBatchNorm::new(&plain.clone().fork(&device), &ProcessGroup::single());
    let expected = plain.forward(sample(&device)).into_data();
    single
        .forward(sample(&device))
        .into_data()
        .assert_eq(&expected, true);
    for states in [
        [&plain.running_mean, &single.running_mean],
        [&plain.running_var, &single.running_var],
    ] {
        let [plain, single] = states.map(|it| it.value_sync().into_data());
        plain.assert_eq(&single, true);
    }

    // Without a collective: one rank of two calls alone.
    let inference = Device::flex();
    let results = locally(2, |group| {
        if group.rank() == 1 {
            return None;
        }
        let norm = SyncBatchNorm::new(&plain, &group);
        let frozen = norm.clone().freeze().forward(sample(&device)).into_data();
        let valid = norm.valid().forward(sample(&inference)).into_data();
        Some([frozen, valid])
    });
    let expected = plain.valid().forward(sample(&inference)).into_data();
    for data in results.into_iter().flatten().flatten() {
        data.assert_approx_eq::<f32>(&expected, Tolerance::default());
    }
}

#[test]
fn records_are_those_of_batch_norm() {
    let folder = tempfile::tempdir().unwrap();
    let device = Device::flex().autodiff();
    let group = ProcessGroup::single();
    let trained: BatchNorm = BatchNormConfig::new(2).init(&device);
    trained.forward(sample(&device));
    // Burn's records leave out an update that nobody has asked for yet.
    trained.running_mean.value_sync();
    trained.running_var.value_sync();
    let sync = SyncBatchNorm::new(&trained, &group);

    for (name, to_plain) in [("sync", true), ("plain", false)] {
        let path = folder.path().join(name);
        let state = match to_plain {
            true => {
                sync.clone().save_file(&path).unwrap();
                let fresh = BatchNormConfig::new(2).init(&device);
                let loaded = fresh.try_load_file(&path).unwrap();
                [loaded.running_mean, loaded.running_var]
            }
            false => {
                trained.clone().save_file(&path).unwrap();
                let fresh = BatchNormConfig::new(2).init(&device);
                let fresh = SyncBatchNorm::new(&fresh, &group);
                let loaded = fresh.try_load_file(&path).unwrap();
                [loaded.running_mean, loaded.running_var]
            }
        };
        let expected = [&trained.running_mean, &trained.running_var];
        for (state, expected) in state.iter().zip(expected) {
            let expected = expected.value_sync().into_data();
            state.value_sync().into_data().assert_eq(&expected, true);
        }
    }
    let back = BatchNorm::from(sync);
    assert_eq!(back.gamma.id, trained.gamma.id);
}

#[test]
fn it_trains_under_gradient_checkpointing() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    check(DType::F32, 2e-5, &device, false);
}

#[test]
fn backward_runs_when_the_model_and_its_group_are_gone() {
    let layered = |device: Device| {
        let layers = with_custom_ops(Layers::on(device));
        layers.serve().unwrap().autodiff()
    };
    for layers in [false, true] {
        let gradients = locally(2, |group| {
            let device = match layers {
                false => Device::flex().autodiff(),
                true => layered(Device::flex()),
            };
            let scale = 1.0 + group.rank() as f32;
            let input = sample(&device).mul_scalar(scale).require_grad();
            let loss = {
                // A handle of the group that nobody else has.
                let norm = SyncBatchNorm::new(&BatchNormConfig::new(2).init(&device), &group);
                drop(group);
                let output = norm.forward(input.clone());
                (output.clone() * output).slice(0..1).sum()
            };
            let gradients = loss.backward();
            values(input.grad(&gradients).unwrap())
        });
        // As one process has it.
        let device = Device::flex().autodiff();
        let whole = Tensor::cat(vec![sample(&device), sample(&device).mul_scalar(2.0)], 0);
        let whole = whole.require_grad();
        let output = BatchNormConfig::new(2).init(&device).forward(whole.clone());
        let squares = output.clone() * output;
        let loss = squares.clone().slice(0..1).sum() + squares.slice(4..5).sum();
        let expected = values(whole.grad(&loss.backward()).unwrap());
        close(&gradients.concat(), &expected, 2e-5, "gradients");
    }
}

#[test]
fn a_fault_surfaces_in_the_next_call() {
    let device = Device::flex().autodiff();
    let errors = locally(2, |group| {
        if group.rank() == 1 {
            return group.abort("enough").to_string();
        }
        while group.fault().is_none() {
            std::thread::yield_now();
        }
        let norm = SyncBatchNorm::new(&BatchNormConfig::new(2).init(&device), &group);
        let output = norm.forward(sample(&device).require_grad());
        let _grads = output.sum().backward();
        group.barrier().unwrap_err().to_string()
    });
    assert_eq!(errors, ["rank 1 aborted: enough"; 2]);
}

/// In forward and in backward, on a layered device too.
#[test]
fn calls_have_the_time_limit_of_the_handle() {
    let limit = Duration::from_millis(400);
    let plain = || Device::flex().autodiff();
    for device in [plain, layered] {
        for forwards in [0, 1] {
            let errors = locally(2, |group| {
                let device = device();
                let norm = BatchNormConfig::new(2).init(&device);
                let norm = SyncBatchNorm::new(&norm, &group.with_timeout(limit));
                // Rank 1 lacks either pass.
                if group.rank() == 0 || forwards == 1 {
                    let input = sample(&device).require_grad();
                    let output = norm.forward(input.clone());
                    if group.rank() == 0 {
                        let gradients = output.sum().backward();
                        values(input.grad(&gradients).unwrap());
                    } else {
                        values(output);
                    }
                }
                while group.fault().is_none() {
                    std::thread::yield_now();
                }
                group.barrier().unwrap_err()
            });
            for error in errors {
                let found = matches!(error, DdpError::Timeout { after, .. } if after == limit);
                assert!(found, "{error}");
            }
        }
    }
}

fn layered() -> Device {
    let layers = with_custom_ops(Layers::on(Device::flex()));
    layers.serve().unwrap().autodiff()
}

/// Running statistics before and after a step with batches of these sizes, one for each rank.
fn running(sizes: &[usize], device: impl Fn() -> Device + Sync) -> Vec<[[Vec<f64>; 2]; 2]> {
    locally(sizes.len(), |group| {
        let device = device();
        let norm = SyncBatchNorm::new(&BatchNormConfig::new(2).init(&device), &group);
        let statistics =
            || [&norm.running_mean, &norm.running_var].map(|it| values(it.value_sync()));
        norm.forward(sample(&device) + 3.0);
        let before = statistics();
        let input = sample(&device).slice(0..sizes[group.rank()]).require_grad();
        let output = norm.forward(input.clone());
        let shape = output.dims();
        let gradients = output.sum().backward();
        assert_eq!(input.grad(&gradients).unwrap().dims(), shape);
        [before, statistics()]
    })
}

#[test]
fn without_samples_the_running_statistics_stay() {
    let flex = || Device::flex().autodiff();
    for sizes in [&[0][..], &[0, 0], &[0, 0, 0]] {
        for [before, after] in running(sizes, flex).iter().chain(&running(sizes, layered)) {
            assert_eq!(before, after);
        }
    }
    // Where one has some, they move on all.
    let [before, alone] = running(&[4], flex).remove(0);
    assert_ne!(before, alone);
    for [_, after] in running(&[0, 4], flex) {
        for (found, expected) in after.iter().zip(&alone) {
            close(found, expected, 1e-6, "running statistics");
        }
    }
}

#[test]
fn each_direction_takes_one_call() {
    let device = Device::flex().autodiff();
    for channels in [1, 2, 300] {
        locally(3, |group| {
            let norm = BatchNormConfig::new(channels).init(&device);
            let norm = SyncBatchNorm::new(&norm, &group);
            // The first asks all ranks once by which way tensors travel.
            norm.forward(Tensor::<3>::ones([2, channels, 3], &device));
            let start = group.stats().calls;
            let calls = || group.stats().calls - start;
            let input = Tensor::<3>::ones([2, channels, 3], &device).require_grad();
            let output = norm.forward(input);
            assert_eq!(calls(), 1);
            let _gradients = output.sum().backward();
            assert_eq!(calls(), 2);
            norm.valid()
                .forward(Tensor::<3>::ones([2, channels, 3], &Device::flex()));
            assert_eq!(calls(), 2);
        });
    }
}
