//! The running statistics where ranks have no samples.

use burn::{nn::BatchNormConfig, tensor::Device};
use burn_ddp::SyncBatchNorm;

use super::{close, layered, sample, values};
use crate::suite::ranks::locally;

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
