//! Data parallel training against one process with the whole batch, and what can differ over ranks.

use burn::{
    module::{Module, Param},
    nn::{
        BatchNormConfig, Linear, LinearConfig,
        conv::{Conv2d, Conv2dConfig},
    },
    optim::{GradientsAccumulator, GradientsParams, SgdConfig, momentum::MomentumConfig},
    tensor::{Device, Distribution, Tensor, TensorData, activation::relu},
};
use burn_ddp::{
    Compression, Ddp, DdpConfig, DdpError, Overlap, ProcessGroup, SyncBatchNorm, Timeline,
    with_custom_ops,
};
use burn_layer::Layers;
use serde::{Deserialize, Serialize};

use crate::ranks::{locally, meeting_place, over_tcp, start};

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    norm: SyncBatchNorm,
    head: Linear,
}

impl Net {
    fn new(group: &ProcessGroup, device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([3, 4], [3, 3]).init(device),
            norm: SyncBatchNorm::new(&BatchNormConfig::new(4).init(device), group),
            head: LinearConfig::new(4 * 6 * 6, 5).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
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
    losses: Vec<f32>,
    /// Averages over the ranks, of all parameters in each step.
    gradients: Vec<f32>,
}

impl Run {
    fn is_near(&self, other: &Self, tolerance: f32) {
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
fn train(group: &ProcessGroup, config: DdpConfig, batch: usize) -> (Vec<f32>, Run) {
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
    let device = with_custom_ops(Layers::on(device).layer(overlap.layer()))
        .serve()
        .unwrap()
        .autodiff();
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

#[test]
fn ranks_train_as_one_process_does() {
    let (start, whole) = train(&ProcessGroup::single(), DdpConfig::new(), 12);
    assert!(whole.losses[19] < whole.losses[0]);
    // 20 steps of a convolution, a norm and a linear layer.
    assert_eq!(whole.gradients.len(), 20 * (112 + 8 + 144 * 5 + 5));
    for world_size in [2, 3, 4] {
        // Buckets so small that there are several, and gradients that fill one alone.
        let config = DdpConfig::new().bucket_bytes(600).first_bucket_bytes(100);
        let ranks = over_tcp(world_size, 1, |group| train(&group, config.clone(), 12));
        for (same_start, run) in &ranks {
            assert_eq!(*same_start, start);
            run.is_near(&whole, 1e-5);
            let first = &ranks[0].1;
            assert_eq!(run.parameters, first.parameters, "equal to the bit");
            assert_eq!(run.gradients, first.gradients, "equal to the bit");
        }
    }
}

#[test]
fn compressed_gradients_still_train_and_ranks_stay_equal() {
    let (_, whole) = train(&ProcessGroup::single(), DdpConfig::new(), 8);
    for (compression, tolerance) in [(Compression::BF16, 2e-2), (Compression::F16, 2e-3)] {
        let config = DdpConfig::new().compression(compression);
        let ranks = locally(2, |group| train(&group, config.clone(), 8).1.parameters);
        let error = closest(&ranks[0], &whole.parameters);
        assert!(error > 0.0 && error < tolerance, "{compression:?}: {error}");
        assert_eq!(ranks[0], ranks[1]);
    }
}

#[test]
fn parameters_and_running_statistics_come_from_rank_0() {
    let ranks = over_tcp(3, 1, |group| {
        let device = Device::flex().autodiff();
        let model = Net::new(&group, &device);
        // Statistics of its own for each rank.
        let alone = SyncBatchNorm::new(&model.norm.clone().into(), &ProcessGroup::single());
        alone.forward(Tensor::<2>::random([8, 4], Distribution::Default, &device));
        let before = contents(&model);
        let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let model = ddp.broadcast_parameters(model).unwrap();
        assert!(model.conv.weight.is_require_grad());
        assert!(!model.norm.running_mean.value().is_require_grad());
        (before, contents(&model))
    });
    let gap = |a: &[f32], b: &[f32]| a.iter().zip(b).position(|(a, b)| a != b);
    assert!(gap(&ranks[0].0, &ranks[1].0).is_some());
    for (_, after) in &ranks {
        assert_eq!(gap(after, &ranks[0].1), None);
        // The weights are rank 0's; the statistics' last update has come in addition.
        assert_eq!(gap(after, &ranks[0].0), Some(4 * 27 + 4 + 8));
    }
}

#[test]
fn a_different_model_is_named_on_all_ranks() {
    let errors = over_tcp(3, 1, |group| {
        let device = Device::flex().autodiff();
        let inputs = if group.rank() == 2 { 4 } else { 3 };
        let model = LinearConfig::new(inputs, 2).init(&device);
        Ddp::new(&group, DdpConfig::new(), &model).unwrap_err()
    });
    for error in errors {
        let DdpError::ModelMismatch { rank: 2, problem } = &error else {
            panic!("{error}");
        };
        assert!(
            problem.contains("`weight`") && problem.contains('4'),
            "{problem}"
        );
    }
    let errors = locally(2, |group| {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(3, 2)
            .with_bias(group.rank() == 0)
            .init(&device);
        Ddp::new(&group, DdpConfig::new(), &model)
            .unwrap_err()
            .to_string()
    });
    for error in errors {
        assert!(
            error.contains("rank 1") && error.contains("nothing, expected `bias`"),
            "{error}"
        );
    }
}

#[derive(Module, Debug)]
struct Branches {
    used: Param<Tensor<1>>,
    sometimes: Param<Tensor<1>>,
    never: Param<Tensor<1>>,
}

#[test]
fn unused_parameters_hold_nobody_up() {
    over_tcp(2, 1, |group| {
        let device = Device::flex().autodiff();
        let param = || Param::from_tensor(Tensor::<1>::ones([3], &device));
        let model = Branches {
            used: param(),
            sometimes: param(),
            never: param(),
        };
        let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let mut loss = model.used.val().sum() * (1.0 + group.rank() as f32);
        if group.rank() == 1 {
            loss = loss + model.sometimes.val().sum() * 4.0;
        }
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model).unwrap();
        let get = |param: &Param<Tensor<1>>| {
            let gradient = gradients.get::<1>(param.id)?;
            Some(gradient.into_data().try_to_vec::<f32>().unwrap())
        };
        assert_eq!(get(&model.used), Some(vec![1.5; 3]));
        assert_eq!(get(&model.sometimes), Some(vec![2.0; 3]));
        assert_eq!(get(&model.never), None);
    });
}

#[test]
fn accumulation_averages_once() {
    locally(2, |group| {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(2, 1).init(&device);
        let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let gradients = |value: f32| {
            let input = Tensor::<2>::full([1, 2], value, &device);
            GradientsParams::from_grads(model.forward(input).sum().backward(), &model)
        };
        let rank = group.rank() as f32;
        let bytes = group.stats().bytes_reduced;
        let local = ddp
            .no_sync(|ddp| ddp.reduce_gradients(gradients(rank), &model))
            .unwrap();
        let weight = local.get::<2>(model.weight.id).unwrap();
        assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [rank; 2]);
        assert_eq!((ddp.stats().steps, group.stats().bytes_reduced), (0, bytes));

        let averaged = ddp.reduce_gradients(gradients(rank), &model).unwrap();
        let weight = averaged.get::<2>(model.weight.id).unwrap();
        assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [0.5; 2]);
        assert_eq!(ddp.stats().steps, 1);
        assert!(ddp.all_reduce_any(group.rank() == 1).unwrap());
    });
}

#[test]
fn another_model_is_refused() {
    locally(2, |group| {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(2, 1).init(&device);
        let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let frozen = model.freeze();
        let error = ddp
            .reduce_gradients(GradientsParams::new(), &frozen)
            .unwrap_err();
        assert!(matches!(error, DdpError::InvalidArgument(_)));
    });
}

/// What the ranks of a job in processes of their own say at the end.
pub(crate) fn results(scenario: &str, world_size: usize) -> Vec<(bool, String)> {
    let (_folder, url) = meeting_place();
    start(scenario, world_size, &url, 60.0)
        .into_iter()
        .map(|rank| rank.finish(std::time::Duration::from_secs(100)))
        .collect()
}

#[test]
fn overlapped_ranks_train_as_one_process_does() {
    let (_, whole) = train(&ProcessGroup::single(), DdpConfig::new(), 12);
    for world_size in [2, 3, 4] {
        for (success, output) in results("overlapped", world_size) {
            assert!(success, "{output}");
            let (_, text) = output.split_once("RESULT ok ").unwrap();
            let text = text.lines().next().unwrap();
            let (run, hidden): (Run, f64) = serde_json::from_str(text).unwrap();
            run.is_near(&whole, 1e-5);
            assert!((0.0..=1.0).contains(&hidden));
        }
    }
}

#[test]
fn overlapped_gradients_are_compressed() {
    let (_, whole) = train(&ProcessGroup::single(), DdpConfig::new(), 12);
    for (success, output) in results("overlapped bf16", 2) {
        assert!(success, "{output}");
        let (_, text) = output.split_once("RESULT ok ").unwrap();
        let text = text.lines().next().unwrap();
        let parameters: Vec<f32> = serde_json::from_str(text).unwrap();
        let error = closest(&parameters, &whole.parameters);
        assert!(error > 1e-5 && error < 2e-2, "{error}");
    }
}

#[test]
fn overlapped_ranks_must_use_the_same_parameters() {
    for (success, output) in results("overlapped unused", 2) {
        assert!(!success);
        assert!(output.contains("RESULT error"), "{output}");
        let named = output.contains("a gradient of `sometimes`");
        assert!(named || output.contains("diverged"), "{output}");
    }
}

#[test]
fn overlapped_accumulation_averages_once() {
    for (success, output) in results("overlapped accumulation", 2) {
        assert!(success, "{output}");
    }
}

#[test]
fn overlap_needs_layers() {
    let group = ProcessGroup::single();
    let model = LinearConfig::new(2, 1).init(&Device::flex().autodiff());
    let overlap = Overlap::new(&group, DdpConfig::new()).unwrap();
    let error = Ddp::overlapped(&group, overlap, &model).unwrap_err();
    assert!(error.to_string().contains("has no layers"), "{error}");
}

/// A linear layer on a layered device of this process.
pub(crate) fn layered(
    group: &ProcessGroup,
    config: DdpConfig,
) -> Result<(Device, Overlap), DdpError> {
    let overlap = Overlap::new(group, config)?;
    let device = Layers::on(Device::flex())
        .layer(overlap.layer())
        .serve()
        .unwrap();
    Ok((device.autodiff(), overlap))
}

pub(crate) fn unused_when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, DdpConfig::new())?;
    let param = || Param::from_tensor(Tensor::<1>::ones([3], &device));
    let model = Branches {
        used: param(),
        sometimes: param(),
        never: param(),
    };
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    let mut loss = model.used.val().sum();
    if group.rank() == 1 {
        loss = loss + model.sometimes.val().sum();
    }
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    ddp.reduce_gradients(gradients, &model).map(drop)
}

pub(crate) fn accumulate_when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, DdpConfig::new())?;
    let model = LinearConfig::new(2, 1).init(&device);
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    let rank = group.rank() as f32;
    let gradients = || {
        let input = Tensor::<2>::full([1, 2], rank, &device);
        GradientsParams::from_grads(model.forward(input).sum().backward(), &model)
    };
    let weight = |gradients: &GradientsParams| {
        let weight = gradients.get::<2>(model.weight.id).unwrap();
        weight.into_data().try_to_vec::<f32>().unwrap()
    };
    // Two micro-steps without averaging, then their sum's average, twice.
    for round in 1..=2 {
        let mut accumulator = GradientsAccumulator::new();
        for _ in 0..2 {
            let local = ddp.no_sync(|ddp| ddp.reduce_gradients(gradients(), &model))?;
            assert_eq!(weight(&local), [rank; 2]);
            accumulator.accumulate(&model, local);
        }
        let averaged = ddp.reduce_gradients(accumulator.grads(), &model)?;
        assert_eq!(weight(&averaged), [1.0; 2]);
        assert_eq!(ddp.stats().steps, round);
    }
    Ok(())
}
