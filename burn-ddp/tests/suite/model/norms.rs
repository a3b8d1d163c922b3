//! `SyncBatchNorm` over batches of any sizes beside Burn's `BatchNorm` over all of them as one.

use std::ops::Range;

use burn::{
    module::RunningState,
    nn::{BatchNorm, BatchNormConfig},
    tensor::{DType, Device, Tensor, TensorData},
};
use burn_ddp::SyncBatchNorm;
use proptest::prelude::*;

use super::{config, values::mix, watched};
use crate::suite::{
    ranks::locally,
    sync_batch_norm::{close, values},
};

#[derive(Clone, Debug)]
struct Case {
    /// The batch of each rank.
    batches: Vec<usize>,
    channels: usize,
    /// What follows batch and channels.
    rest: Vec<usize>,
    offset: f64,
    scale: f64,
    momentum: f64,
    epsilon: f64,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let batch = prop_oneof![1 => Just(0usize), 4 => 1usize..5];
    (
        prop::collection::vec(batch, 1..5),
        prop_oneof![4 => 1usize..6, 1 => Just(40usize)],
        prop::collection::vec(1usize..6, 0..3),
        (-20.0f64..20.0, 0.1f64..10.0, 0.0f64..1.0),
        prop::sample::select(vec![1e-3, 1e-5]),
        any::<u64>(),
    )
        .prop_map(
            |(batches, channels, rest, (offset, scale, momentum), epsilon, seed)| Case {
                batches,
                channels,
                rest,
                offset,
                scale,
                momentum,
                epsilon,
                seed,
            },
        )
}

impl Case {
    /// Drawn numbers between -1 and 1.
    fn numbers(&self, what: u64, len: usize) -> Vec<f64> {
        let one = |index: usize| {
            let bits = mix(self.seed ^ mix(what) ^ index as u64);
            (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        };
        (0..len).map(one).collect()
    }

    fn input(&self, what: u64, batch: usize) -> Vec<f64> {
        let numbers = self.numbers(what, batch * self.sample());
        numbers
            .iter()
            .map(|it| it * self.scale + self.offset)
            .collect()
    }

    /// The batch of a rank, another one in the next pass.
    fn batch(&self, rank: usize, pass: usize) -> usize {
        self.batches[(rank + pass) % self.batches.len()]
    }

    /// The number of elements of a sample.
    fn sample(&self) -> usize {
        self.channels * self.rest.iter().product::<usize>()
    }

    fn norm(&self, dtype: DType) -> BatchNorm {
        let device = Device::flex().autodiff();
        let config = BatchNormConfig::new(self.channels)
            .with_epsilon(self.epsilon)
            .with_momentum(self.momentum);
        let mut norm = config.init(&device);
        let parameter =
            |what| tensor::<1>(self.numbers(what, self.channels), [self.channels], dtype);
        norm.gamma = norm
            .gamma
            .map(|_| (parameter(1) + 1.5).detach().require_grad());
        norm.beta = norm.beta.map(|_| parameter(2).require_grad());
        // Burn's norm takes them in the type of the input alone.
        let channels = || vec![1.0; self.channels];
        let running = |value: f64| tensor(channels(), [self.channels], dtype).mul_scalar(value);
        norm.running_mean = RunningState::new(running(0.0));
        norm.running_var = RunningState::new(running(1.0));
        norm
    }
}

fn tensor<const D: usize>(values: Vec<f64>, shape: [usize; D], dtype: DType) -> Tensor<D> {
    Tensor::from_data(
        TensorData::new(values, shape),
        (&Device::flex().autodiff(), dtype),
    )
}

/// What comes of each pass.
#[derive(Default)]
struct Outcome {
    y: Vec<Vec<f64>>,
    dx: Vec<Vec<f64>>,
    /// The gradients of gamma and beta.
    parameters: Vec<Vec<f64>>,
    /// The mean and variance after it.
    running: Vec<Vec<f64>>,
}

/// Two passes over the batches of some ranks as one. `forward` is that of `norm`, maybe with other ranks.
fn passes<const D: usize>(
    case: &Case,
    dtype: DType,
    ranks: Range<usize>,
    norm: &BatchNorm,
    forward: impl Fn(Tensor<D>) -> Tensor<D>,
) -> Outcome {
    let mut outcome = Outcome::default();
    for pass in 0..2 {
        let joined = |what: usize, of: &dyn Fn(u64, usize) -> Vec<f64>| -> Vec<f64> {
            let each = ranks.clone().map(|rank| {
                let batch = case.batch(rank, pass);
                of((what + pass * 64 + rank) as u64, batch)
            });
            each.collect::<Vec<_>>().concat()
        };
        let x = joined(1000, &|what, batch| case.input(what, batch));
        let dy = joined(2000, &|what, batch| {
            case.numbers(what, batch * case.sample())
        });
        let mut shape = [0; D];
        shape[0] = x.len() / case.sample();
        shape[1] = case.channels;
        shape[2..].copy_from_slice(&case.rest);
        let x = tensor(x, shape, dtype).require_grad();
        let y = forward(x.clone());
        assert_eq!((y.dims(), y.dtype()), (shape, dtype));
        let gradients = (y.clone() * tensor(dy, shape, dtype)).sum().backward();
        outcome.y.push(values(y));
        outcome.dx.push(values(x.grad(&gradients).unwrap()));
        // Without a sample there may be none.
        let of = |parameter: &Tensor<1>| match parameter.grad(&gradients) {
            Some(gradient) => values(gradient),
            None => vec![0.0; case.channels],
        };
        outcome
            .parameters
            .push([of(&norm.gamma.val()), of(&norm.beta.val())].concat());
        let running = [&norm.running_mean, &norm.running_var];
        outcome
            .running
            .push(running.map(|it| values(it.value_sync())).concat());
    }
    outcome
}

fn check<const D: usize>(case: &Case) {
    let ranks = case.batches.len();
    let norm = case.norm(DType::F64);
    // A batch of nothing has no statistics.
    let whole = passes::<D>(case, DType::F64, 0..ranks, &norm, |x| {
        match x.shape().num_elements() {
            0 => x.mul_scalar(1.0),
            _ => norm.forward(x),
        }
    });
    // Differences of numbers far from 0 lose digits, and the more the smaller the deviation is.
    let digits = case.offset.abs() / case.epsilon.sqrt() + 10.0;
    for (dtype, tolerance) in [(DType::F64, 1e-13 * digits), (DType::F32, 3e-6 * digits)] {
        let outcomes = locally(ranks, |group| {
            let rank = group.rank();
            let norm = case.norm(dtype);
            let synchronized = SyncBatchNorm::new(&norm, &group);
            passes::<D>(case, dtype, rank..rank + 1, &norm, |x| {
                synchronized.forward(x)
            })
        });
        for pass in 0..2 {
            let joined = |of: fn(&Outcome) -> &Vec<Vec<f64>>| -> Vec<f64> {
                let parts = outcomes.iter().map(|outcome| &of(outcome)[pass][..]);
                parts.collect::<Vec<_>>().concat()
            };
            close(&joined(|it| &it.y), &whole.y[pass], tolerance, "y");
            let steep = tolerance / case.epsilon.sqrt();
            close(&joined(|it| &it.dx), &whole.dx[pass], steep, "dx");
            let sum = |place: usize| outcomes.iter().map(|it| it.parameters[pass][place]).sum();
            let summed: Vec<f64> = (0..2 * case.channels).map(sum).collect();
            let many = tolerance * (case.sample() * ranks * 4) as f64;
            close(&summed, &whole.parameters[pass], many, "gamma and beta");
            for outcome in &outcomes {
                let running = &outcome.running[pass];
                // These are f32 whatever the input is.
                close(
                    running,
                    &whole.running[pass],
                    tolerance.max(1e-5),
                    "running",
                );
                assert_eq!(*running, outcomes[0].running[pass], "equal to the bit");
            }
        }
    }
}

fn run(case: &Case) {
    match case.rest.len() {
        0 => check::<2>(case),
        1 => check::<3>(case),
        _ => check::<4>(case),
    }
}

proptest! {
    #![proptest_config(config(60))]
    #[test]
    fn it_is_batch_norm_of_the_batches_of_all_ranks(case in cases()) {
        watched(&case, run);
    }
}
