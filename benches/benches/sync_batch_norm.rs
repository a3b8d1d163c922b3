//! What does SyncBatchNorm cost, compared with BatchNorm? Forward and backward in f32, on two ranks that are threads connected
//! by TCP, each with a batch of its own.

use benches::{Comparison, Partner, is_selected, tcp_groups};
use burn::{
    nn::{BatchNorm, BatchNormConfig},
    tensor::{Device, Distribution, Tensor},
};
use burn_ddp::SyncBatchNorm;

fn main() {
    for shape in [[8, 16, 32, 32], [8, 64, 8, 8], [32, 64, 32, 32]] {
        let name = format!("{shape:?}");
        if !is_selected(&name) {
            continue;
        }
        let table = Comparison::new(
            &format!("What does synchronizing a normalization of {name} cost?"),
            "BatchNorm",
            batch_norm(shape),
        )
        .with("SyncBatchNorm", sync_batch_norm(shape))
        .run(50);
        println!("{table}");
    }
}

fn norm(shape: [usize; 4]) -> (BatchNorm, Tensor<4>) {
    let device = Device::flex().autodiff();
    let x = Tensor::random(shape, Distribution::Default, &device).require_grad();
    (BatchNormConfig::new(shape[1]).init(&device), x)
}

fn batch_norm(shape: [usize; 4]) -> impl FnMut() {
    let part = || {
        let (norm, x) = norm(shape);
        move || drop(norm.forward(x.clone()).powi_scalar(2).mean().backward())
    };
    let partner = Partner::new(part());
    let mut own = part();
    move || partner.join_in(&mut own)
}

fn sync_batch_norm(shape: [usize; 4]) -> impl FnMut() {
    let [mut own, theirs] = tcp_groups().map(|group| {
        let (norm, x) = norm(shape);
        let norm = SyncBatchNorm::new(&norm, &group);
        move || drop(norm.forward(x.clone()).powi_scalar(2).mean().backward())
    });
    let partner = Partner::new(theirs);
    move || partner.join_in(&mut own)
}
