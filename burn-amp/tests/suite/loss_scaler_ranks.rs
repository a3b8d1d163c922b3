//! Ranks that agree: threads, with a barrier as their all-reduce.

use super::loss_scaler_support::{gradients, loss, problem, values};
use burn::{
    optim::AdamConfig,
    tensor::{Bool, Device, Tensor},
};
use burn_amp::{DeviceAdamConfig, DeviceOptimizer, LossScalerConfig};
use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

const RANKS: usize = 3;

/// Whether any rank says so.
struct AnyRank {
    barrier: Barrier,
    any: AtomicBool,
}

impl AnyRank {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            barrier: Barrier::new(RANKS),
            any: AtomicBool::new(false),
        })
    }

    fn all_reduce(&self, value: bool) -> bool {
        self.any.fetch_or(value, Ordering::SeqCst);
        self.barrier.wait();
        let any = self.any.load(Ordering::SeqCst);
        if self.barrier.wait().is_leader() {
            self.any.store(false, Ordering::SeqCst);
        }
        self.barrier.wait();
        any
    }
}

/// What a rank saw at each step: its scale, and whether its parameters moved.
type Seen = Vec<(f32, bool)>;

fn on_every_rank(train: impl Fn(usize, &AnyRank) -> Seen + Send + Sync) -> Vec<Seen> {
    let group = AnyRank::new();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                scope.spawn({
                    let (train, group) = (&train, &group);
                    move || train(rank, group)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// At step 1 rank 0 overflows alone, at step 3 the ranks 1 and 2 do.
fn overflows(rank: usize, step: usize) -> bool {
    (step == 1 && rank == 0) || (step == 3 && rank > 0)
}

const STEPS: usize = 5;

/// Of PyTorch's defaults from 1024: halved at steps 1 and 3.
const EXPECTED: [(f32, bool); STEPS] = [
    (1024.0, true),
    (512.0, false),
    (512.0, true),
    (256.0, false),
    (256.0, true),
];

fn config() -> LossScalerConfig {
    LossScalerConfig::new().with_init_scale(1024.0)
}

#[test]
fn ranks_skip_together() {
    let seen = on_every_rank(|rank, group| {
        let (mut model, x) = problem(&Device::flex().autodiff());
        let mut optim = AdamConfig::new().init();
        let mut scaler = config().init().unwrap();
        let step = |step: usize| {
            let before = values(&model);
            let overflow = overflows(rank, step);
            let grads = gradients(scaler.scale(loss(&model, &x, overflow)), &model);
            let unscaled = scaler.unscale(grads, &model);
            assert_eq!(unscaled.overflow().is_some(), overflow);
            let any_rank = group.all_reduce(unscaled.overflow().is_some());
            let status;
            (model, status) = unscaled
                .agree(any_rank)
                .step(&mut optim, 0.1, model.clone());
            scaler.update_after([&status]).unwrap();
            if let Some(found) = status.overflow {
                // Only the rank that overflowed knows where.
                assert_eq!(found.parameters.is_empty(), !overflow);
                assert_eq!(found.to_string().contains("another rank"), !overflow);
            }
            (scaler.current_scale(), values(&model) != before)
        };
        (0..STEPS).map(step).collect()
    });
    assert_eq!(seen, vec![EXPECTED.to_vec(); RANKS]);
}

#[test]
fn ranks_skip_together_on_the_device() {
    let seen = on_every_rank(|rank, group| {
        let device = Device::flex().autodiff();
        let (mut model, x) = problem(&device);
        let mut optim = DeviceOptimizer::from(DeviceAdamConfig::new().build());
        let mut scaler = config().init_on(&device).unwrap();
        let step = |step: usize| {
            let before = values(&model);
            let overflow = overflows(rank, step);
            let grads = gradients(scaler.scale(loss(&model, &x, overflow)), &model);
            let unscaled = scaler.unscale(grads, &model);
            let any_rank = group.all_reduce(unscaled.overflow().into_scalar::<bool>());
            let any_rank = Tensor::<1, Bool>::from_data([any_rank], &Device::flex());
            let unscaled = unscaled.agree(any_rank);
            scaler.update(unscaled.overflow());
            model = unscaled.step(&mut optim, 0.1, model.clone());
            (scaler.current_scale(), values(&model) != before)
        };
        (0..STEPS).map(step).collect()
    });
    assert_eq!(seen, vec![EXPECTED.to_vec(); RANKS]);
}
