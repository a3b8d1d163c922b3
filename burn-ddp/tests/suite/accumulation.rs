//! Gradients of several micro-steps, added up: in Burn's way, in PyTorch's and others, while backward averages, against one
//! process that has all batches at once.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{GradientsAccumulator, GradientsParams, SgdConfig},
    tensor::{Device, Tensor, TensorData},
};
use burn_ddp::{
    CommHook, Ddp, DdpConfig, DdpError, GradientBucket, ProcessGroup, ReduceOp, Values,
};

use crate::suite::{
    net::{closest, contents},
    overlapped::layered,
    ranks::all_succeed,
};

const MICRO_STEPS: usize = 3;
const STEPS: usize = 4;
/// A step that does not update the model, as where a loss scaler finds an overflow.
const SKIPPED: usize = 1;

/// A model that starts the same everywhere.
fn started(device: &Device) -> Linear {
    let model = LinearConfig::new(3, 2).init(device);
    let wave = |old: Tensor<2>| {
        let values = (0..6).map(|index| (index as f32).cos()).collect();
        Tensor::from_data(TensorData::new(values, old.dims()), device).require_grad()
    };
    let zeros = |old: Tensor<1>| old.zeros_like().require_grad();
    Linear {
        weight: model.weight.map(wave),
        bias: model.bias.map(|bias| bias.map(zeros)),
    }
}

fn batch(rank: usize, step: usize, micro_step: usize, device: &Device) -> Tensor<2> {
    let value = |index: usize| ((rank * 17 + step * 29 + micro_step * 5 + index) as f32).sin();
    let values: Vec<f32> = (0..6).map(value).collect();
    Tensor::from_data(TensorData::new(values, [2, 3]), device)
}

fn loss(model: &Linear, batch: Tensor<2>) -> Tensor<1> {
    model.forward(batch).powi_scalar(2).mean()
}

/// The hook of the documentation, for losses that are divided by the whole batch.
#[derive(Debug)]
pub(crate) struct Sum;

impl CommHook for Sum {
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
        let mut values = bucket.values;
        values.all_reduce(group, ReduceOp::Sum)?;
        Ok(values)
    }
}

/// Which micro-steps run inside `no_sync`.
pub(crate) type Inside = fn(usize) -> bool;

/// All of them; PyTorch's way, all but the last; the last alone; none.
pub(crate) const WAYS: [Inside; 4] = [
    |_| true,
    |micro_step| micro_step + 1 < MICRO_STEPS,
    |micro_step| micro_step + 1 == MICRO_STEPS,
    |_| false,
];

/// The parameters at the end.
fn train(
    mut ddp: Ddp,
    mut model: Linear,
    device: &Device,
    inside: Inside,
    divisor: usize,
) -> Result<Vec<f32>, DdpError> {
    let rank = ddp.group().rank();
    let mut optimizer = SgdConfig::new().init();
    for step in 0..STEPS {
        let mut accumulator = GradientsAccumulator::new();
        for micro_step in 0..MICRO_STEPS {
            let backward = || {
                let loss = loss(&model, batch(rank, step, micro_step, device));
                GradientsParams::from_grads((loss / divisor as f32).backward(), &model)
            };
            let gradients = match inside(micro_step) {
                true => ddp.no_sync(|_| backward()),
                false => backward(),
            };
            accumulator.accumulate(&model, gradients);
        }
        let gradients = ddp.reduce_gradients(accumulator.grads(), &model)?;
        if step != SKIPPED {
            model = optimizer.step(0.5, model, gradients);
        }
    }
    Ok(contents(&model))
}

/// The same in one process, on the batches of all ranks and micro-steps as one.
fn whole(ranks: usize) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let mut model = started(&device);
    let mut optimizer = SgdConfig::new().init();
    for step in 0..STEPS {
        let batches = (0..ranks).flat_map(|rank| (0..MICRO_STEPS).map(move |it| (rank, it)));
        let batches = batches.map(|(rank, micro_step)| batch(rank, step, micro_step, &device));
        let loss = loss(&model, Tensor::cat(batches.collect(), 0));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        if step != SKIPPED {
            model = optimizer.step(0.5, model, gradients);
        }
    }
    contents(&model)
}

/// Checks that all ranks have ended as one process does, and alike to the bit.
fn check(group: &ProcessGroup, parameters: &[f32]) -> Result<(), DdpError> {
    let error = closest(parameters, &whole(group.world_size()));
    assert!(error < 1e-5, "{error}");
    for theirs in group.all_gather(parameters)?.chunks(parameters.len()) {
        assert_eq!(theirs, parameters);
    }
    Ok(())
}

fn train_overlapped(
    group: &ProcessGroup,
    config: DdpConfig,
    inside: Inside,
    divisor: usize,
) -> Result<Vec<f32>, DdpError> {
    let (device, overlap) = layered(group, config)?;
    let model = started(&device);
    let ddp = Ddp::overlapped(group, overlap, &model)?;
    let model = ddp.broadcast_parameters(model)?;
    train(ddp, model, &device, inside, divisor)
}

/// Sums, which must not be summed up again: right, or refused.
pub(crate) fn sums_when_overlapped(group: &ProcessGroup, refused: Inside) -> Result<(), DdpError> {
    let config = || DdpConfig::new().hook(Sum);
    let divisor = MICRO_STEPS * group.world_size();
    // Burn submits gradients in the first pass over parameters alone, which in PyTorch's way is unheard.
    for inside in [WAYS[0], WAYS[1]] {
        check(group, &train_overlapped(group, config(), inside, divisor)?)?;
    }
    let error = train_overlapped(group, config(), refused, divisor).unwrap_err();
    assert!(error.to_string().contains("`Ddp::no_sync`"), "{error}");
    Ok(())
}

#[test]
fn sums_are_not_summed_up_twice() {
    for scenario in ["overlapped sums", "overlapped sums, none inside"] {
        all_succeed(scenario, 2);
    }
}

/// Trains a model that was never marked, or not since its record was loaded.
pub(crate) fn unmarked_when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    for loaded in [false, true] {
        let (device, overlap) = layered(group, DdpConfig::new())?;
        let mut model = started(&device);
        let ddp = Ddp::overlapped(group, overlap, &model)?;
        if loaded {
            let record = model.clone().into_record();
            model = ddp.broadcast_parameters(model)?.load_record(record);
        }
        check(group, &train(ddp, model, &device, |_| false, MICRO_STEPS)?)?;
        println!("STEP");
    }
    Ok(())
}

#[test]
fn a_model_that_was_not_marked_is_averaged_and_warned_of_once() {
    for output in all_succeed("overlapped unmarked", 2) {
        let [never, loaded, _] = output.split("STEP").collect::<Vec<_>>()[..] else {
            panic!("{output}")
        };
        for steps in [never, loaded] {
            let warnings = steps.lines().filter(|line| line.contains("are not marked"));
            assert_eq!(warnings.count(), 1, "{output}");
            assert!(steps.contains("broadcast_parameters"), "{output}");
        }
    }
}
