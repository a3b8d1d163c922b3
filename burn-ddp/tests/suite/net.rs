//! A small network, trained on a rank's share of each batch.

use burn::{
    module::{Module, Param},
    nn::{
        BatchNormConfig, Linear, LinearConfig,
        conv::{Conv2d, Conv2dConfig},
    },
    optim::{GradientsParams, SgdConfig, momentum::MomentumConfig},
    tensor::{Device, Tensor, TensorData, activation::relu},
};
use burn_ddp::{Ddp, DdpConfig, DdpError, Overlap, ProcessGroup, SyncBatchNorm, Timeline};
use serde::{Deserialize, Serialize};

#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) conv: Conv2d,
    pub(crate) norm: SyncBatchNorm,
    pub(crate) head: Linear,
}

impl Net {
    pub(crate) fn new(group: &ProcessGroup, device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([3, 4], [3, 3]).init(device),
            norm: SyncBatchNorm::new(&BatchNormConfig::new(4).init(device), group),
            head: LinearConfig::new(4 * 6 * 6, 5).init(device),
        }
    }

    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv.forward(images)));
        self.head.forward(x.flatten(1, 3))
    }
}

/// All parameters and buffers, by the visitors' order.
pub(crate) fn contents<M: Module>(model: &M) -> Vec<f32> {
    struct Reader(Vec<f32>);
    impl burn::module::ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut reader = Reader(Vec::new());
    model.visit(&mut reader);
    reader.0
}

pub(crate) fn closest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// What there is to compare of a run.
#[derive(Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) parameters: Vec<f32>,
    /// Means over the ranks, of each step.
    pub(crate) losses: Vec<f32>,
    /// Averages over the ranks, of all parameters in each step.
    pub(crate) gradients: Vec<f32>,
}

impl Run {
    pub(crate) fn is_near(&self, other: &Self, tolerance: f32) {
        for (what, ours, theirs) in [
            ("parameters", &self.parameters, &other.parameters),
            ("losses", &self.losses, &other.losses),
            ("gradients", &self.gradients, &other.gradients),
        ] {
            let error = closest(ours, theirs);
            assert!(error < tolerance, "{what}: {error}");
        }
    }
}

/// Trains on the share of each batch that the group gives this rank; returns the parameters at the
/// start, and the run.
pub(crate) fn train(group: &ProcessGroup, config: DdpConfig, batch: usize) -> (Vec<f32>, Run) {
    train_at(group, config, batch, Device::flex())
}

/// The same on a device.
pub(crate) fn train_at(
    group: &ProcessGroup,
    config: DdpConfig,
    batch: usize,
    device: Device,
) -> (Vec<f32>, Run) {
    let device = device.autodiff();
    let norms = group.duplicate().unwrap();
    // Each rank starts with parameters of its own.
    let model = Net::new(&norms, &device);
    let mut ddp = Ddp::new(group, config, &model).unwrap();
    let mut model = ddp.broadcast_parameters(model).unwrap();
    let start = same_start(&mut model, &device);
    (start, train_on(model, &mut ddp, &device, batch))
}

/// The same on a layered device, with gradients averaged during backward.
pub(crate) fn train_overlapped(
    group: &ProcessGroup,
    config: DdpConfig,
    batch: usize,
    device: Device,
) -> Result<(Run, Timeline), DdpError> {
    let norms = group.duplicate()?;
    let overlap = Overlap::new(group, config)?;
    let device = overlap.serve(device).unwrap().autodiff();
    let mut model = Net::new(&norms, &device);
    same_start(&mut model, &device);
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    let run = train_on(model, &mut ddp, &device, batch);
    Ok((run, ddp.timeline().unwrap()))
}

/// The gradients of all parameters, in the visitors' order.
fn values<M: Module>(gradients: &GradientsParams, model: &M) -> Vec<f32> {
    struct Reader<'a>(&'a GradientsParams, Vec<f32>);
    impl burn::module::ModuleVisitor for Reader<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.get::<D>(param.id) {
                self.1.extend(gradient.into_data().iter::<f32>());
            }
        }
    }
    let mut reader = Reader(gradients, Vec::new());
    model.visit(&mut reader);
    reader.1
}

fn train_on(mut model: Net, ddp: &mut Ddp, device: &Device, batch: usize) -> Run {
    let group = ddp.group().clone();
    let momentum = MomentumConfig::new().with_momentum(0.9);
    let mut optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
    let (mut losses, mut averages) = (Vec::new(), Vec::new());
    let share = batch / group.world_size();
    for step in 0..20 {
        let images: Vec<f32> = (0..batch * 3 * 64)
            .map(|index| ((index * 7 + step * 131) as f32 * 0.37).sin())
            .collect();
        let targets: Vec<f32> = (0..batch * 5)
            .map(|index| ((index * 3 + step * 17) as f32).cos())
            .collect();
        let images = Tensor::<4>::from_data(TensorData::new(images, [batch, 3, 8, 8]), device);
        let targets = Tensor::<2>::from_data(TensorData::new(targets, [batch, 5]), device);
        let own = group.rank() * share..(group.rank() + 1) * share;
        let output = model.forward(images.slice(own.clone()));
        let loss = (output - targets.slice(own)).powi_scalar(2).mean();
        let mut mean = [loss.clone().into_scalar::<f32>()];
        group
            .all_reduce(&mut mean, burn_ddp::ReduceOp::Mean)
            .unwrap();
        losses.push(mean[0]);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model).unwrap();
        averages.extend(values(&gradients, &model));
        model = optimizer.step(0.05, model, gradients);
    }
    let stats = ddp.stats();
    if group.world_size() > 1 {
        assert_eq!(stats.steps, 20);
        assert!(stats.bytes_reduced > 0 && stats.buckets > 0);
    }
    Run {
        parameters: contents(&model),
        losses,
        gradients: averages,
    }
}

/// The same start for all runs, whatever the number of ranks.
fn same_start(model: &mut Net, device: &Device) -> Vec<f32> {
    let wave = |shape: &[usize], phase: f32| {
        let len: usize = shape.iter().product();
        let values: Vec<f32> = (0..len).map(|i| (i as f32 + phase).sin() * 0.2).collect();
        TensorData::new(values, shape.to_vec())
    };
    model.conv.weight = model
        .conv
        .weight
        .clone()
        .map(|old| Tensor::from_data(wave(&old.dims(), 1.0), device).require_grad());
    model.head.weight = model
        .head
        .weight
        .clone()
        .map(|old| Tensor::from_data(wave(&old.dims(), 2.0), device).require_grad());
    for bias in [&mut model.conv.bias, &mut model.head.bias] {
        *bias = bias
            .take()
            .map(|bias| bias.map(|old| old.zeros_like().require_grad()));
    }
    contents(model)
}
