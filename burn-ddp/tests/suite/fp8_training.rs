//! Fp8 layers on two ranks: their scales are those of one process with the whole batch.

use std::sync::Arc;

use burn::{
    module::Module,
    nn::LinearConfig,
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Tensor, TensorData},
};
use burn_ddp::{ProcessGroup, ReduceOp};
use burn_fp8::{
    Fp8Linear, ScalingState,
    recipe::{CurrentScaling, DelayedScaling, Fp8Recipe},
    share_amaxes,
};

use crate::suite::ranks::{locally, over_tcp};

/// Rows of the whole batch; each rank has half of them, or where it says so the first all.
const ROWS: usize = 8;

#[derive(Module, Debug)]
struct Model {
    first: Fp8Linear,
    second: Fp8Linear,
}

impl Model {
    fn new(recipe: Fp8Recipe, device: &Device) -> Self {
        let layer = |d_input: usize, d_output: usize| {
            let mut linear = LinearConfig::new(d_input, d_output)
                .with_bias(false)
                .init(device);
            let values = numbers(d_input as u64, d_input * d_output);
            let weight = Tensor::from_data(TensorData::new(values, [d_input, d_output]), device);
            linear.weight = linear.weight.map(|_| weight.require_grad());
            Fp8Linear::from_linear(linear, recipe).unwrap()
        };
        Self {
            first: layer(6, 5),
            second: layer(5, 3),
        }
    }

    fn with_group(self, group: &Arc<ProcessGroup>) -> Self {
        Self {
            first: self.first.with_amax_reducer(group.clone()),
            second: self.second.with_amax_reducer(group.clone()),
        }
    }

    /// One step on some rows of the batch of `step`; the loss is a sum, so that gradients of rows are those of the whole.
    fn step(self, step: u64, rows: core::ops::Range<usize>, group: Option<&ProcessGroup>) -> Self {
        let device = Device::flex().autodiff();
        let values = numbers(100 + step, ROWS * 6);
        let values = values[rows.start * 6..rows.end * 6].to_vec();
        let x = Tensor::<2>::from_data(TensorData::new(values, [rows.len(), 6]), &device);
        // Without an activation in between, which would turn tiny differences of the weights into larger ones.
        let output = self.second.forward(self.first.forward(x));
        let loss = output.powf_scalar(2.0).sum() / ROWS as f32;
        let mut gradients = GradientsParams::from_grads(loss.backward(), &self);
        if let Some(group) = group {
            for id in [self.first.weight.id, self.second.weight.id] {
                let own = gradients.remove::<2>(id);
                let shape = match id == self.first.weight.id {
                    true => [6, 5],
                    false => [5, 3],
                };
                let mut sum = match own {
                    Some(own) => own.into_data().try_to_vec::<f32>().unwrap(),
                    None => vec![0.0; shape[0] * shape[1]],
                };
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                let sum = Tensor::<2>::from_data(TensorData::new(sum, shape), &Device::flex());
                gradients.register(id, sum);
            }
        }
        SgdConfig::new().init().step(0.05, self, gradients)
    }

    fn states(&self) -> Vec<ScalingState> {
        let layers = [&self.first, &self.second];
        let states = layers.map(|layer| layer.scaling_state().unwrap());
        states.into_iter().flatten().collect()
    }

    fn weights(&self) -> Vec<f32> {
        let weights = [&self.first, &self.second].map(|layer| layer.weight.val().into_data());
        weights
            .into_iter()
            .flat_map(|data| data.try_to_vec::<f32>().unwrap())
            .collect()
    }
}

/// Uniform in -1..1 (a linear congruential generator, Knuth's MMIX).
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    next();
    (0..count).map(|_| next()).collect()
}

/// The rows of a rank in a step. In the third, the second has none.
fn rows(step: u64, rank: usize) -> core::ops::Range<usize> {
    match (step, rank) {
        (2, 0) => 0..ROWS,
        (2, _) => ROWS..ROWS,
        (_, rank) => rank * ROWS / 2..(rank + 1) * ROWS / 2,
    }
}

/// When the ranks share their amaxes.
#[derive(Clone, Copy, Debug)]
enum Sharing {
    EachLayer,
    EachStep,
}

fn train(recipe: Fp8Recipe, sharing: Sharing, group: ProcessGroup) -> Model {
    let amaxes = Arc::new(group.duplicate().unwrap());
    let mut model = Model::new(recipe, &Device::flex().autodiff());
    if let Sharing::EachLayer = sharing {
        model = model.with_group(&amaxes);
    }
    for step in 0..6 {
        model = model.step(step, rows(step, group.rank()), Some(&group));
        if let Sharing::EachStep = sharing {
            model = share_amaxes(model, &group).unwrap();
        }
    }
    model
}

#[track_caller]
fn assert_near(actual: &[f32], expected: &[f32]) {
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(expected) {
        let close = (actual - expected).abs() <= 1e-4 * expected.abs().max(1e-2);
        assert!(close, "{actual} is not {expected}");
    }
}

#[test]
fn two_ranks_scale_as_one_process_does() {
    let recipe = DelayedScaling::new().with_amax_history_len(4);
    for recipe in [recipe, recipe.with_interval(2)] {
        let mut whole = Model::new(recipe.into(), &Device::flex().autodiff());
        for step in 0..6 {
            whole = whole.step(step, 0..ROWS, None);
        }
        for ranks in [
            locally(2, |group| train(recipe.into(), Sharing::EachLayer, group)),
            over_tcp(2, 1, |group| {
                train(recipe.into(), Sharing::EachLayer, group)
            }),
            locally(2, |group| train(recipe.into(), Sharing::EachStep, group)),
        ] {
            let scaling = |model: &Model| -> Vec<_> {
                let states = model.states().into_iter();
                states.map(|state| (state.history, state.scale)).collect()
            };
            assert_eq!(scaling(&ranks[0]), scaling(&ranks[1]));
            assert_eq!(ranks[0].weights(), ranks[1].weights());
            // Weights differ from the whole batch's in the last bits, for sums are taken in another order.
            for (actual, expected) in scaling(&ranks[0]).into_iter().zip(scaling(&whole)) {
                assert!(expected.1 != 1.0);
                assert_near(&actual.0, &expected.0);
                assert_near(&[actual.1], &[expected.1]);
            }
            // The inputs of the first layer do not depend on weights.
            let [actual, expected] = [&ranks[0], &whole].map(|model| scaling(model)[0].clone());
            assert_eq!(actual, expected);
            assert_near(&ranks[0].weights(), &whole.weights());
        }
    }
}

/// With one step's outputs in hand: the rows are, bit for bit, those of the whole batch.
#[test]
fn current_scales_are_those_of_the_whole_batch() {
    let device = Device::flex().autodiff();
    let input = |rows: core::ops::Range<usize>| {
        let values = numbers(7, ROWS * 6)[rows.start * 6..rows.end * 6].to_vec();
        Tensor::<2>::from_data(TensorData::new(values, [rows.len(), 6]), &device)
    };
    let forward = |model: &Model, rows| {
        let output = model.second.forward(model.first.forward(input(rows)));
        output.into_data().try_to_vec::<f32>().unwrap()
    };
    let recipe = Fp8Recipe::from(CurrentScaling::new());
    let whole = forward(&Model::new(recipe, &device), 0..ROWS);
    for step in [0, 2] {
        let ranks = locally(2, |group| {
            let rows = rows(step, group.rank());
            let group = Arc::new(group);
            forward(&Model::new(recipe, &device).with_group(&group), rows)
        });
        assert_eq!(ranks.concat(), whole);
    }
}
