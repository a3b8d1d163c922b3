//! Rank 0 alone writes checkpoints; what it has is what all have.

use std::{thread, time::Duration};

use burn::{
    module::Module,
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::SgdConfig,
    tensor::Tensor,
};
use burn_ddp::{
    AtomicCheckpointer, DdpStrategy, DistributedSampler, EpochCheckpoints, ProcessGroup,
};
use burn_train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
    checkpoint::{Checkpoint, Checkpointer, CheckpointerError, KeepLastNCheckpoints},
};

use super::{
    device,
    program::{Batch, Falling, dealt},
    train,
};
use crate::suite::{net::contents, ranks::locally};

#[test]
fn rank_0_alone_writes_checkpoints_from_which_all_resume() {
    let shared = tempfile::tempdir().unwrap();
    let run = |epochs: usize, from: Option<usize>| {
        locally(2, |group| {
            train(
                &group,
                group.rank() as f32,
                &device(),
                epochs,
                |training, learner| {
                    let saved = EpochCheckpoints::open(shared.path(), &group).unwrap();
                    let main = group.is_main();
                    let guarded = |files| Guarded { main, files };
                    let mut training = training
                        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
                        .with_custom_checkpointers(
                            guarded(saved.model()),
                            guarded(saved.optimizer()),
                            guarded(saved.scheduler()),
                        );
                    if let Some(epoch) = from {
                        training = training.checkpoint(epoch);
                    }
                    let result = DdpStrategy::new(&group, device()).launch(training, learner);
                    // The last is there on whichever rank is the first to return.
                    let last = shared.path().join(format!("optim-{epochs}.bpk"));
                    assert!(last.exists());
                    result
                },
            )
        })
    };
    let straight = run(5, None);
    let mut names: Vec<String> = std::fs::read_dir(shared.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let kept =
        [4, 5].map(|epoch| ["model", "optim", "scheduler"].map(|it| format!("{it}-{epoch}.bpk")));
    let mut kept = kept.concat();
    kept.sort();
    assert_eq!(names, kept);
    // Rank 1 starts elsewhere, and comes to the same end.
    run(2, None);
    let resumed = run(5, Some(2));
    for end in &resumed {
        assert_eq!(end.parameters, straight[0].parameters);
        assert_eq!(end.steps, 3 * 3);
    }
    let all = straight[0].log.finals("valid Accuracy");
    assert_eq!(resumed[0].log.finals("valid Accuracy"), all[2..]);
}

/// A checkpointer which only rank 0 may write with.
struct Guarded {
    main: bool,
    files: AtomicCheckpointer,
}

impl<R: Checkpoint> Checkpointer<R> for Guarded {
    fn save(&self, epoch: usize, record: R) -> Result<(), CheckpointerError> {
        assert!(self.main, "only rank 0 writes");
        // Slow disks are waited for.
        thread::sleep(Duration::from_millis(50));
        self.files.save(epoch, record)
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        assert!(self.main, "only rank 0 deletes");
        Checkpointer::<R>::delete(&self.files, epoch)
    }

    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        self.files.restore(epoch)
    }
}

/// With statistics that each rank takes over its own data.
#[derive(Module, Debug)]
struct Normed {
    norm: BatchNorm,
    head: Linear,
}

impl InferenceStep for Normed {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        let output = self.head.forward(self.norm.forward(batch.features.clone()));
        let loss = (output.clone() - batch.features.clone())
            .powi_scalar(2)
            .mean();
        RegressionOutput::new(loss, output, batch.features)
    }
}

impl TrainStep for Normed {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

#[test]
fn running_statistics_are_those_of_rank_0() {
    let ends = locally(2, |group| {
        let device = device();
        let sampler = |group: &ProcessGroup| DistributedSampler::new(16, group.rank(), 2);
        let folder = tempfile::tempdir().unwrap();
        let loader = || dealt(16, 4, sampler(&group));
        let training = SupervisedTraining::new(folder.path(), loader(), loader())
            .with_application_logger(None)
            .num_epochs(2);
        let model = Normed {
            norm: BatchNormConfig::new(4).init(&device),
            head: LinearConfig::new(4, 4).init(&device),
        };
        let before = statistics(&model.norm);
        let learner = Learner::new(model, SgdConfig::new().init(), Falling::default());
        let result = DdpStrategy::new(&group, device).launch(training, learner);
        assert!(result.error.is_none());
        (
            before,
            statistics(&result.model.norm),
            contents(&result.model),
        )
    });
    // They have moved, and are the same.
    assert_ne!(ends[0].0, ends[0].1);
    assert_eq!(ends[0].1, ends[1].1);
    assert_eq!(ends[0].2, ends[1].2);
    // Rank 0's are those of its own items: momentum 0.1, four batches.
    let mut mean = vec![0f64; 4];
    for _epoch in 0..2 {
        for batch in dealt(16, 4, DistributedSampler::new(16, 0, 2)).iter() {
            let features = batch.unwrap().features;
            let own = features.mean_dim(0).into_data();
            for (mean, own) in mean.iter_mut().zip(own.iter::<f64>()) {
                *mean = 0.9 * *mean + 0.1 * own;
            }
        }
    }
    for (value, expected) in ends[0].1.iter().zip(&mean) {
        assert!(
            (f64::from(*value) - expected).abs() < 1e-5,
            "{value} {expected}"
        );
    }
}

/// The running mean.
fn statistics(norm: &BatchNorm) -> Vec<f32> {
    let mean: Tensor<1> = norm.running_mean.value_sync();
    mean.into_data().try_to_vec().unwrap()
}
