//! Its calls of the group: how many there are, and what they do with faults, limits and handles.

use std::time::Duration;

use burn::{
    module::Module,
    nn::BatchNormConfig,
    tensor::{Device, Tensor},
};
use burn_ddp::{DdpError, SyncBatchNorm, with_custom_ops};
use burn_layer::Layers;

use super::{close, layered, sample, values};
use crate::suite::ranks::locally;

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
