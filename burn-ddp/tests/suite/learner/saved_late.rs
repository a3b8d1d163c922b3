//! Checkpoints that are written while the next epoch trains: they are of the epoch that has ended.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use burn::{
    module::{Module, Param},
    optim::AdamConfig,
    tensor::Tensor,
};
use burn_ddp::{
    AtomicCheckpointer, DdpError, DdpStrategy, DistributedSampler, EpochCheckpoints, ProcessGroup,
};
use burn_pack::Reader;
use burn_train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
    checkpoint::{Checkpoint, Checkpointer, CheckpointerError, KeepLastNCheckpoints},
};

use super::program::{Batch, Falling, dealt};
use crate::suite::{devices::cube_devices, ranks::all_succeed};

/// The steps of an epoch, with two items each.
const STEPS: usize = 4;

/// One parameter, whose gradient is always 1.
#[derive(Module, Debug)]
struct Steady {
    weight: Param<Tensor<1>>,
}

impl InferenceStep for Steady {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, _batch: Batch) -> RegressionOutput {
        let output: Tensor<2> = self.weight.val().reshape([1, 3]);
        RegressionOutput::new(output.clone().sum(), output.clone(), output)
    }
}

impl TrainStep for Steady {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

/// Writes the files of the first epoch when the second has changed the optimizer's state.
struct Late {
    steps: Arc<AtomicUsize>,
    files: AtomicCheckpointer,
}

impl<R: Checkpoint> Checkpointer<R> for Late {
    fn save(&self, epoch: usize, record: R) -> Result<(), CheckpointerError> {
        // A step counts before the optimizer takes it.
        while self.steps.load(Ordering::SeqCst) < STEPS + 2 {
            thread::yield_now();
        }
        self.files.save(epoch, record)
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        Checkpointer::<R>::delete(&self.files, epoch)
    }

    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        self.files.restore(epoch)
    }
}

/// Played by a process of its own, since a served device, which other tests have, changes how all devices are read.
pub(crate) fn save_late(group: &ProcessGroup) -> Result<String, DdpError> {
    for device in cube_devices() {
        let device = device.autodiff();
        let folder = tempfile::tempdir().unwrap();
        let saved = EpochCheckpoints::open(folder.path(), group)?;
        let rate = Falling::default();
        let late = |files| Late {
            steps: rate.steps.clone(),
            files,
        };
        let sampler = || DistributedSampler::new(2 * STEPS, 0, 1);
        let loader = || dealt(2 * STEPS, 2, sampler());
        let training = SupervisedTraining::new(folder.path().join("log"), loader(), loader())
            .with_application_logger(None)
            .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
            .with_custom_checkpointers(
                late(saved.model()),
                late(saved.optimizer()),
                late(saved.scheduler()),
            )
            .num_epochs(2);
        let model = Steady {
            weight: Param::from_tensor(Tensor::ones([3], &device)),
        };
        let learner = Learner::new(model, AdamConfig::new().init(), rate);
        let result = DdpStrategy::new(group, device).launch(training, learner);
        assert!(result.error.is_none());
        for epoch in [1, 2] {
            let file = folder.path().join(format!("optim-{epoch}.bpk"));
            let file = Reader::from_file(file).unwrap();
            for (name, beta) in [("moment_1", 0.9f32), ("moment_2", 0.999)] {
                let mut names = file.tensor_names().into_iter();
                let name = names.find(|it| it.ends_with(name)).unwrap();
                let bytes = file.tensor_data(name).unwrap();
                let (values, _) = bytes.as_chunks();
                let values: Vec<f32> = values.iter().map(|it| f32::from_le_bytes(*it)).collect();
                let expected = 1.0 - beta.powi((epoch * STEPS) as i32);
                assert!(
                    values.len() == 3 && values.iter().all(|it| (it - expected).abs() < 1e-5),
                    "{name} of epoch {epoch}: {values:?}, expected {expected}"
                );
            }
        }
    }
    Ok(String::new())
}

#[test]
fn what_is_written_late_is_of_its_epoch() {
    all_succeed("learner saved late", 1);
}
