//! A model with random numbers, resumed.

use std::path::Path;

use burn::{
    module::Module,
    nn::{Dropout, DropoutConfig},
    optim::SgdConfig,
};
use burn_ddp::{DdpError, DdpStrategy, DistributedSampler, EpochCheckpoints, ProcessGroup};
use burn_train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
    checkpoint::KeepLastNCheckpoints,
};

use super::{
    device,
    program::{BATCH, Batch, Falling, ITEMS, Net, dealt},
};
use crate::suite::{net::contents, ranks::all_succeed};

#[derive(Module, Debug)]
struct Dropping {
    dropout: Dropout,
    net: Net,
}

impl InferenceStep for Dropping {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, mut batch: Batch) -> ClassificationOutput {
        batch.features = self.dropout.forward(batch.features);
        InferenceStep::step(&self.net, batch)
    }
}

impl TrainStep for Dropping {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

/// The parameters after some epochs, of which `from` were trained before.
fn train(
    group: &ProcessGroup,
    folder: &Path,
    seed: Option<u64>,
    epochs: usize,
    from: Option<usize>,
) -> Result<Vec<f32>, DdpError> {
    let loader = || {
        let sampler = DistributedSampler::new(ITEMS, group.rank(), group.world_size());
        dealt(ITEMS, BATCH / group.world_size(), sampler)
    };
    let saved = EpochCheckpoints::open(folder, group)?;
    let mut training = SupervisedTraining::new(folder.join("log"), loader(), loader())
        .with_application_logger(None)
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
        .with_custom_checkpointers(saved.model(), saved.optimizer(), saved.scheduler())
        .num_epochs(epochs);
    if let Some(epoch) = from {
        training = training.checkpoint(epoch);
    }
    let model = Dropping {
        dropout: DropoutConfig::new(0.5).init(),
        net: Net::new(0.0, 8, &device()),
    };
    let learner = Learner::new(model, SgdConfig::new().init(), Falling::default());
    let mut strategy = DdpStrategy::new(group, device());
    if let Some(seed) = seed {
        strategy = strategy.seed(seed);
    }
    let result = strategy.launch(training, learner);
    match DdpStrategy::fault(&result) {
        Some(fault) => Err(fault.clone()),
        None => Ok(contents(&result.model)),
    }
}

/// Played by processes, as a process has one source of random numbers.
pub(crate) fn resume_with_dropout(group: &ProcessGroup) -> Result<String, DdpError> {
    // Rank 0's, for all.
    let folder = tempfile::tempdir().unwrap();
    let name = folder.path().to_str().unwrap();
    let name = group.broadcast_bytes(name.as_bytes(), 0)?;
    let place = |run: &str| Path::new(&String::from_utf8(name.clone()).unwrap()).join(run);

    let straight = train(group, &place("straight"), Some(5), 4, None)?;
    train(group, &place("resumed"), Some(5), 2, None)?;
    let resumed = train(group, &place("resumed"), Some(5), 4, Some(2))?;
    assert_eq!(resumed, straight);
    assert_ne!(train(group, &place("other"), Some(6), 4, None)?, straight);
    // Without a seed, each run differs.
    let unseeded = train(group, &place("first"), None, 4, None)?;
    assert_ne!(train(group, &place("second"), None, 4, None)?, unseeded);
    group.barrier()?;
    Ok(String::new())
}

#[test]
fn with_a_seed_it_goes_on_as_if_nothing_had_happened() {
    for ranks in [1, 2] {
        all_succeed("learner with dropout", ranks);
    }
}
