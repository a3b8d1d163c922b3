//! Ranks with different numbers of batches, and data of which a part was seen before.

use std::sync::Arc;

use burn_ddp::{
    DdpConfig, DdpStrategy, DistributedLoader, DistributedSampler, ProcessGroup, SamplerState,
};
use burn_train::{LearningResult, SupervisedTraining};

use super::{
    device,
    program::{Falling, ITEMS, Log, Net, Noting, dealt, items, learner, with_log},
    times,
};
use crate::suite::{
    net::{closest, contents},
    ranks::locally,
};

/// Five items: three batches of the one rank, and two of the other.
const FEW: usize = 5;

/// Accumulates gradients of batches that are shared among the ranks; returns the parameters.
fn accumulate(
    group: &ProcessGroup,
    steps: usize,
    batch_size: usize,
    launch: impl FnOnce(SupervisedTraining<Net>, Net) -> LearningResult<Net>,
) -> Vec<f32> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let load = || {
        let sampler = DistributedSampler::evaluation(FEW, rank, ranks);
        dealt(FEW, batch_size, sampler)
    };
    let folder = tempfile::tempdir().unwrap();
    let training = SupervisedTraining::new(folder.path(), load(), load());
    let training = with_log(training, &Log::default()).num_epochs(3);
    let training = training.grads_accumulation(steps);
    let result = launch(training, Net::new(0.0, 8, &device()));
    assert!(result.error.is_none());
    contents(&result.model)
}

#[test]
fn accumulated_gradients_count_the_ranks_that_had_a_batch() {
    for steps in [2, 3] {
        // Its batches are the means over both ranks' items, and the last is one item's.
        let whole = accumulate(&ProcessGroup::single(), steps, 2, |training, model| {
            training.launch(learner(model, Falling::default()))
        });
        let ends = locally(2, |group| {
            accumulate(&group, steps, 1, |training, model| {
                let config = DdpConfig::new().divide_by_initial_world_size(false);
                let strategy = DdpStrategy::new(&group, device()).config(config);
                strategy.launch(training, learner(model, Falling::default()))
            })
        });
        for end in ends {
            assert!(closest(&end, &whole) < 1e-5, "{steps} steps");
        }
    }
}

/// Trains two epochs with loaders that have been at `state`; returns how often each item was seen.
fn resumed(state: SamplerState) -> (Vec<usize>, Vec<Option<String>>) {
    let seen = Noting::default();
    let faults = locally(2, |group| {
        let mut sampler = DistributedSampler::new(ITEMS, group.rank(), 2).shuffle(true);
        sampler.load_state(&state);
        let train = DistributedLoader::new(items(ITEMS), seen.clone(), sampler);
        let valid = dealt(2, 1, DistributedSampler::new(2, group.rank(), 2));
        let folder = tempfile::tempdir().unwrap();
        let training = SupervisedTraining::new(folder.path(), Arc::new(train), valid);
        let training = with_log(training, &Log::default()).num_epochs(2);
        let learner = learner(Net::new(0.0, 8, &device()), Falling::default());
        let result = DdpStrategy::new(&group, device()).launch(training, learner);
        DdpStrategy::fault(&result).map(ToString::to_string)
    });
    (times(&seen, ITEMS), faults)
}

#[test]
fn a_training_goes_on_in_the_middle_of_its_first_epoch() {
    let mut state = SamplerState {
        seed: 3,
        epoch: 0,
        taken: 10,
    };
    let (times, faults) = resumed(state);
    assert_eq!(faults, [None, None]);
    let order = DistributedSampler::new(ITEMS, 0, 1).shuffle(true).seed(3);
    for (place, item) in order.indices().into_iter().enumerate() {
        assert_eq!(times[item], if place < 10 { 1 } else { 2 }, "{place}");
    }
    // That of another epoch is not passed over in silence.
    state.epoch = 4;
    let (times, faults) = resumed(state);
    assert_eq!(times, [0; ITEMS]);
    for fault in faults {
        assert!(fault.unwrap().contains("in the middle of epoch 4"));
    }
}
