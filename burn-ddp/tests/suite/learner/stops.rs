//! What ends a training before its time: on one rank, or on all of them.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use burn::{
    data::{
        dataloader::batcher::Batcher,
        dataset::{Dataset, DatasetError},
    },
    tensor::Device,
};
use burn_ddp::{DdpError, DdpStrategy, DistributedLoader, DistributedSampler, ProcessGroup};
use burn_train::{
    EarlyStoppingStrategy, Interrupter, MetricEarlyStoppingStrategy, StoppingCondition,
    SupervisedTraining, TrainingError,
    metric::{
        LossMetric,
        store::{Aggregate, Direction, EventStoreClient, Split},
    },
};
use nix::sys::signal::Signal;

use super::{
    device,
    program::{Batch, Falling, Item, Log, Net, Noting, dealt, items, learner, with_log},
    train,
};
use crate::suite::ranks::{locally, meeting_place, start};

/// Stops after an epoch, on the one rank that may decide.
#[derive(Clone)]
struct After {
    epoch: usize,
    decides: bool,
}

impl EarlyStoppingStrategy for After {
    fn should_stop(&mut self, epoch: usize, _store: &EventStoreClient) -> bool {
        assert!(self.decides, "rank 0 decides");
        epoch == self.epoch
    }
}

#[test]
fn rank_0_stops_early_for_all() {
    let ends = locally(3, |group| {
        train(&group, 0.0, &device(), 50, |training, learner| {
            let training = training.early_stopping(After {
                epoch: 4,
                decides: group.is_main(),
            });
            DdpStrategy::new(&group, device()).launch(training, learner)
        })
    });
    for end in ends {
        // Neither an error nor an interruption: as in burn-train.
        assert!(end.result.error.is_none() && end.result.interrupted.is_none());
        assert_eq!(end.steps, 4 * 3);
    }
}

#[test]
fn metrics_of_all_ranks_stop_early() {
    // Without learning, no loss ever improves on that of the first epoch.
    let ends = locally(2, |group| {
        let rate = Falling::from(0.0);
        let folder = tempfile::tempdir().unwrap();
        let sampler = |len| DistributedSampler::new(len, group.rank(), 2);
        let training = SupervisedTraining::new(
            folder.path(),
            dealt(8, 2, sampler(8)),
            dealt(5, 2, sampler(5)),
        );
        let stop = MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
            StoppingCondition::NoImprovementSince { n_epochs: 2 },
        );
        let log = Log::default();
        let training = with_log(training, &log).num_epochs(50).early_stopping(stop);
        let learner = learner(Net::new(0.0, 8, &device()), rate.clone());
        let result = DdpStrategy::new(&group, device()).launch(training, learner);
        assert!(result.error.is_none());
        rate.steps.load(Ordering::SeqCst)
    });
    // Epoch 1 is the best; 2 and 3 do not improve on it.
    assert_eq!(ends, [3 * 2, 3 * 2]);
}

/// Asks to stop when it has made some batches.
struct Asking {
    inner: Noting,
    left: AtomicUsize,
    interrupter: Interrupter,
}

impl Batcher<Item, Batch> for Asking {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Batch {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.interrupter.stop(Some("seen enough"));
        }
        self.inner.batch(items, device)
    }
}

#[test]
fn a_stop_on_any_rank_stops_all_after_the_same_step() {
    for asked in [0, 1] {
        let ends = locally(2, |group| {
            let interrupter = Interrupter::new();
            let left = if group.rank() == asked { 5 } else { 1000 };
            let batcher = Asking {
                inner: Noting::default(),
                left: AtomicUsize::new(left),
                interrupter: interrupter.clone(),
            };
            let sampler = DistributedSampler::new(8, group.rank(), 2);
            let loader = DistributedLoader::new(items(8), batcher, sampler.clone()).batch_size(2);
            let folder = tempfile::tempdir().unwrap();
            let rate = Falling::default();
            let training =
                SupervisedTraining::new(folder.path(), Arc::new(loader), dealt(8, 2, sampler));
            let training = with_log(training, &Log::default())
                .num_epochs(50)
                .with_interrupter(interrupter);
            let learner = learner(Net::new(0.0, 8, &device()), rate.clone());
            let result = DdpStrategy::new(&group, device()).launch(training, learner);
            assert!(result.error.is_none());
            let reason = result.interrupted.unwrap().reason.unwrap();
            (rate.steps.load(Ordering::SeqCst), reason)
        });
        for (rank, (steps, reason)) in ends.into_iter().enumerate() {
            // The fifth batch is the first of epoch 3; it is not trained on any more.
            assert_eq!(steps, 4);
            match rank == asked {
                true => assert_eq!(reason, "seen enough"),
                false => assert_eq!(reason, "another rank was asked to stop"),
            }
        }
    }
}

/// Cannot read its fifth item.
struct Broken;

impl Dataset<Item> for Broken {
    fn get(&self, index: usize) -> Result<Item, DatasetError> {
        match index {
            5 => Err(DatasetError::new(std::io::Error::other("no such file"))),
            index => items(8).get(index),
        }
    }

    fn len(&self) -> usize {
        8
    }
}

#[test]
fn a_batch_that_cannot_be_loaded_ends_the_job_on_all_ranks() {
    for split in ["train", "valid"] {
        let ends = locally(2, |group| {
            let sampler = DistributedSampler::new(8, group.rank(), 2);
            let whole = dealt(8, 2, sampler.clone());
            // Item 5 is rank 1's.
            let broken = DistributedLoader::new(Broken, Noting::default(), sampler).batch_size(2);
            let (train, valid) = match split {
                "train" => (Arc::new(broken) as _, whole),
                _ => (whole, Arc::new(broken) as _),
            };
            let folder = tempfile::tempdir().unwrap();
            let training = SupervisedTraining::new(folder.path(), train, valid);
            let training = with_log(training, &Log::default()).num_epochs(3);
            let learner = learner(Net::new(0.0, 8, &device()), Falling::default());
            DdpStrategy::new(&group, device()).launch(training, learner)
        });
        let [first, second] = ends.try_into().ok().unwrap();
        let Some(DdpError::Aborted { rank: 1, reason }) = DdpStrategy::fault(&first) else {
            panic!("{:?}", first.error);
        };
        assert!(reason.contains("no such file"), "{reason}");
        assert!(first.interrupted.is_none());
        // The rank itself has its own error.
        assert!(DdpStrategy::fault(&second).is_none());
        let error = second.error.unwrap();
        assert!(matches!(&*error, TrainingError::Dataset(_)) && error.to_string().contains("file"));
    }
}

#[test]
fn models_that_differ_are_named() {
    let faults = locally(3, |group| {
        let hidden = if group.rank() == 2 { 9 } else { 8 };
        let folder = tempfile::tempdir().unwrap();
        let training = super::training(&group, folder.path(), &Log::default(), 1);
        let learner = learner(Net::new(0.0, hidden, &device()), Falling::default());
        let result = DdpStrategy::new(&group, device()).launch(training, learner);
        DdpStrategy::fault(&result).cloned().unwrap()
    });
    for fault in faults {
        let DdpError::ModelMismatch { rank: 2, problem } = &fault else {
            panic!("{fault}");
        };
        assert!(problem.contains("hidden.weight"), "{problem}");
    }
}

/// Says when it makes a batch.
struct Speaking(Noting);

impl Batcher<Item, Batch> for Speaking {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Batch {
        println!("STEP");
        self.0.batch(items, device)
    }
}

/// Trains until something happens.
pub(crate) fn train_for_ever(group: &ProcessGroup) -> Result<String, DdpError> {
    let sampler = DistributedSampler::new(8, group.rank(), group.world_size());
    let loader = DistributedLoader::new(items(8), Speaking(Noting::default()), sampler.clone());
    let folder = tempfile::tempdir().unwrap();
    let training = SupervisedTraining::new(folder.path(), Arc::new(loader), dealt(8, 2, sampler));
    let training = with_log(training, &Log::default()).num_epochs(usize::MAX);
    let learner = learner(Net::new(0.0, 8, &device()), Falling::default());
    let result = DdpStrategy::new(group, device()).launch(training, learner);
    match DdpStrategy::fault(&result) {
        Some(fault) => Err(fault.clone()),
        None => Ok("ended".into()),
    }
}

#[test]
fn a_killed_rank_ends_the_others() {
    for victim in [0, 1] {
        let (_folder, url) = meeting_place();
        let mut ranks = start("learner for ever", 3, &url, 60.0);
        ranks[victim].wait_for_steps(5);
        ranks[victim].signal(Signal::SIGKILL);
        for (index, rank) in ranks.into_iter().enumerate() {
            let output = rank.fail(20);
            if index != victim {
                let named = format!("RESULT error rank {victim} died");
                assert!(output.contains(&named), "rank {index}: {output}");
            }
        }
    }
}
