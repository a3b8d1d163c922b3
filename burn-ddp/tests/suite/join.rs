//! Ranks with different numbers of batches against one process that has them all.

use burn::{
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig, momentum::MomentumConfig},
    tensor::{Device, Tensor, TensorData},
};
use burn_ddp::{Ddp, DdpConfig, DdpError, ProcessGroup};

use crate::{
    accumulation::Sum,
    net::contents,
    overlapped::layered,
    ranks::{locally, over_tcp},
};

/// How many batches each rank has.
const BATCHES: [usize; 3] = [2, 4, 1];

fn batch(rank: usize, step: usize, device: &Device) -> Tensor<2> {
    let value = |index: usize| ((rank * 17 + step * 5 + index) as f32).sin();
    let values: Vec<f32> = (0..6).map(value).collect();
    Tensor::from_data(TensorData::new(values, [2, 3]), device)
}

fn model(device: &Device) -> Linear {
    let mut model = LinearConfig::new(3, 2).init(device);
    let weights: Vec<f32> = (0..6).map(|index| (index as f32).cos()).collect();
    let weights = TensorData::new(weights, [3, 2]);
    model.weight = model
        .weight
        .map(|_| Tensor::from_data(weights, device).require_grad());
    model.bias = model
        .bias
        .map(|bias| bias.map(|old| old.zeros_like().require_grad()));
    model
}

fn loss(model: &Linear, batch: Tensor<2>) -> Tensor<1> {
    model.forward(batch).powi_scalar(2).mean()
}

fn sgd() -> SgdConfig {
    // With a state, which must be equal on all ranks too.
    SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9)))
}

/// Trains on uneven inputs, twice over; returns the parameters, and the ranks that were active in each step.
fn train(
    mut ddp: Ddp,
    mut model: Linear,
    device: &Device,
    divisor: f32,
) -> Result<(Vec<f32>, Vec<usize>), DdpError> {
    let rank = ddp.group().rank();
    let mut optimizer = sgd().init();
    let mut active = Vec::new();
    for _epoch in 0..2 {
        let mut batches = (0..BATCHES[rank]).map(|step| batch(rank, step, device));
        loop {
            let batch = batches.next();
            active.push(ddp.join(batch.is_some())?);
            if active.last() == Some(&0) {
                break;
            }
            let gradients = match batch {
                Some(batch) => {
                    let loss = loss(&model, batch) / divisor;
                    GradientsParams::from_grads(loss.backward(), &model)
                }
                None => GradientsParams::new(),
            };
            let gradients = ddp.reduce_gradients(gradients, &model)?;
            model = optimizer.step(0.1, model, gradients);
        }
    }
    Ok((contents(&model), active))
}

/// The same in one process: each step's loss is the sum over the ranks that have a batch, divided by
/// the number of all ranks, or of those.
fn expected(ranks: usize, divide_by_all: bool) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let mut model = model(&device);
    let mut optimizer = sgd().init();
    for _epoch in 0..2 {
        for step in 0..4 {
            let active: Vec<usize> = (0..ranks).filter(|rank| BATCHES[*rank] > step).collect();
            let losses = active
                .iter()
                .map(|rank| loss(&model, batch(*rank, step, &device)));
            let divisor = if divide_by_all { ranks } else { active.len() };
            let loss = losses.reduce(|a, b| a + b).unwrap() / divisor as f32;
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.1, model, gradients);
        }
    }
    contents(&model)
}

fn assert_close(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
}

#[test]
fn uneven_inputs_train_as_one_process_does() {
    for divide_by_all in [true, false] {
        let ranks = over_tcp(3, 1, |group| {
            let device = Device::flex().autodiff();
            let model = model(&device);
            let config = DdpConfig::new().divide_by_initial_world_size(divide_by_all);
            let ddp = Ddp::new(&group, config, &model).unwrap();
            train(ddp, model, &device, 1.0).unwrap()
        });
        for (parameters, active) in &ranks {
            assert_eq!(*active, [3, 2, 1, 1, 0, 3, 2, 1, 1, 0]);
            assert_close(parameters, &expected(3, divide_by_all));
            assert_eq!(*parameters, ranks[0].0, "ranks are equal to the bit");
        }
    }
}

#[test]
fn one_rank_just_trains() {
    let device = Device::flex().autodiff();
    let model = model(&device);
    let ddp = Ddp::new(&ProcessGroup::single(), DdpConfig::new(), &model).unwrap();
    let (parameters, active) = train(ddp, model, &device, 1.0).unwrap();
    assert_eq!(active, [1, 1, 0, 1, 1, 0]);
    let ends = locally(1, |group| {
        let model = self::model(&device);
        let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        train(ddp, model, &device, 1.0).unwrap().0
    });
    assert_eq!(ends[0], parameters);
}

/// The same while backward averages gradients, for processes; then with sums, which must not be summed up again where
/// all ranks have batches once more.
pub(crate) fn join_when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    for (config, divisor) in [(DdpConfig::new(), 1.0), (DdpConfig::new().hook(Sum), 2.0)] {
        let (device, overlap) = layered(group, config)?;
        let model = model(&device);
        let ddp = Ddp::overlapped(group, overlap, &model)?;
        let model = ddp.broadcast_parameters(model)?;
        let (parameters, active) = train(ddp, model, &device, divisor)?;
        assert_eq!(active, [2, 2, 1, 1, 0, 2, 2, 1, 1, 0]);
        assert_close(&parameters, &expected(2, true));
    }
    Ok(())
}

#[test]
fn overlapped_ranks_join_too() {
    for (success, output) in crate::overlapped::results("overlapped join", 2) {
        assert!(success, "{output}");
    }
}
