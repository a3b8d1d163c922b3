//! burn-train's `Learner` over ranks, against itself in one process on the whole batch.

mod asked_late;
mod checkpoints;
mod dropout;
mod epochs;
mod outputs;
mod program;
mod renders;
mod saved_late;
mod shares;
mod stops;

use std::{io::Read, process::Stdio, sync::atomic::Ordering};

use burn::{data::dataloader::DataLoaderBuilder, tensor::Device};
use burn_ddp::{
    DdpConfig, DdpError, DdpStrategy, DistributedSampler, Overlap, ProcessGroup, with_custom_ops,
};
use burn_layer::Layers;
use burn_train::{Learner, LearningResult, SupervisedTraining};

use self::program::{
    BATCH, Falling, HELD_OUT, ITEMS, Log, Net, Noting, dealt, items, learner, training, with_log,
};
pub(crate) use self::{
    dropout::resume_with_dropout, epochs::epochs_for_ever, saved_late::save_late,
    stops::train_for_ever,
};
use crate::suite::{
    net::{closest, contents},
    ranks::{Rank, all_succeed, as_rank, locally, meeting_place, over_tcp, player, result},
};

const EPOCHS: usize = 7;

fn device() -> Device {
    Device::flex().autodiff()
}

/// What a rank knows at the end.
struct End {
    parameters: Vec<f32>,
    log: Log,
    steps: usize,
    result: LearningResult<Net>,
}

/// Trains with the strategy that `launch` chooses.
fn train(
    group: &ProcessGroup,
    seed: f32,
    device: &Device,
    epochs: usize,
    launch: impl FnOnce(SupervisedTraining<Net>, Learner<Net>) -> LearningResult<Net>,
) -> End {
    let folder = tempfile::tempdir().unwrap();
    let (log, rate) = (Log::default(), Falling::default());
    let training = training(group, folder.path(), &log, epochs);
    let learner = learner(Net::new(seed, 8, device), rate.clone());
    let result = launch(training, learner);
    End {
        parameters: contents(&result.model),
        log,
        steps: rate.steps.load(Ordering::SeqCst),
        result,
    }
}

/// Without us.
fn alone(accumulation: Option<usize>) -> End {
    let group = ProcessGroup::single();
    let end = train(&group, 0.0, &device(), EPOCHS, |training, learner| {
        match accumulation {
            Some(steps) => training.grads_accumulation(steps),
            None => training,
        }
        .launch(learner)
    });
    assert!(end.result.error.is_none());
    end
}

#[test]
fn ranks_train_as_one_process_does() {
    let whole = alone(None);
    assert_eq!(whole.steps, 21);
    let losses = whole.log.finals("train Loss");
    assert!(losses[EPOCHS - 1] < losses[0] * 0.9, "{losses:?}");
    for ranks in [1, 2, 3, 4] {
        let ends = over_tcp(ranks, 1, |group| {
            // Only rank 0 starts as the one process does.
            let seed = group.rank() as f32;
            let strategy = DdpStrategy::new(&group, Device::flex());
            train(&group, seed, &device(), EPOCHS, |training, learner| {
                strategy.launch(training, learner)
            })
        });
        for end in &ends {
            assert!(end.result.error.is_none() && end.result.interrupted.is_none());
            assert!(closest(&end.parameters, &whole.parameters) < 1e-5);
            assert_eq!(end.parameters, ends[0].parameters);
            assert_eq!(end.steps, whole.steps);
        }
        // Metrics are rank 0's, over all ranks.
        let (log, others) = ends.split_first().unwrap();
        for metric in ["train Accuracy", "valid Accuracy"] {
            let finals = (log.log.finals(metric), whole.log.finals(metric));
            assert_eq!(finals.0.len(), EPOCHS);
            for (mean, whole) in finals.0.iter().zip(&finals.1) {
                assert!((mean - whole).abs() < 1e-9, "{metric}: {mean} {whole}");
            }
            let items = match metric {
                "train Accuracy" => ITEMS,
                _ => HELD_OUT,
            };
            assert_eq!(log.log.count(metric), items * EPOCHS, "{metric}");
        }
        for (mean, whole) in log.log.finals("train Loss").iter().zip(&losses) {
            assert!((mean - whole).abs() < 1e-5, "{mean} {whole}");
        }
        for other in others {
            assert!(other.log.finals("valid Accuracy").is_empty());
        }
    }
}

#[test]
fn accumulated_gradients_are_averaged_once() {
    // Three batches an epoch: the last is a step of its own.
    let whole = alone(Some(2));
    assert_eq!(whole.steps, 14);
    let ends = locally(2, |group| {
        train(&group, 0.0, &device(), EPOCHS, |training, learner| {
            let training = training.grads_accumulation(2);
            DdpStrategy::new(&group, device()).launch(training, learner)
        })
    });
    for end in &ends {
        assert_eq!(end.steps, whole.steps);
        assert!(closest(&end.parameters, &whole.parameters) < 1e-5);
    }
}

#[test]
fn training_outputs_may_stay_where_they_are() {
    let ends = locally(2, |group| {
        train(&group, 0.0, &device(), 1, |training, learner| {
            let strategy = DdpStrategy::new(&group, device()).gather_training(false);
            strategy.launch(training, learner)
        })
    });
    assert_eq!(ends[0].log.count("train Accuracy"), ITEMS / 2);
    assert_eq!(ends[0].log.count("valid Accuracy"), HELD_OUT);
}

/// The scenario of a program that installs no logger.
pub(crate) const WITHOUT_LOGGER: &str = "learner without a logger";

pub(crate) fn train_without_logger(group: &ProcessGroup) -> Result<String, DdpError> {
    let strategy = DdpStrategy::new(group, device());
    train(group, 0.0, &device(), 1, |training, learner| {
        strategy.launch(training, learner)
    });
    log::error!("said by rank {}", group.rank());
    log::warn!("whispered by rank {}", group.rank());
    Ok(String::new())
}

/// Rank 0's would be in burn-train's file, which this training does not write.
#[test]
fn errors_of_ranks_without_a_log_file_are_printed() {
    let (_folder, url) = meeting_place();
    let ranks = [0, 1].map(|rank| {
        let mut command = player(WITHOUT_LOGGER);
        let command = as_rank(&mut command, WITHOUT_LOGGER, rank, 2, &url, 60.0);
        Rank(command.stderr(Stdio::piped()).spawn().unwrap())
    });
    for (rank, mut process) in ranks.into_iter().enumerate() {
        let mut stderr = process.0.stderr.take().unwrap();
        process.succeed(100);
        let mut printed = String::new();
        stderr.read_to_string(&mut printed).unwrap();
        let said = printed.contains(&format!("said by rank {rank}"));
        assert_eq!(said, rank == 1, "{printed}");
        assert!(!printed.contains("whispered"), "{printed}");
    }
}

/// Played by processes, since each needs a layered device of its own: see [`overlapped`].
pub(crate) fn train_overlapped(group: &ProcessGroup) -> Result<String, DdpError> {
    let mut all = Vec::new();
    for accumulation in [None, Some(2)] {
        let config = DdpConfig::new().bucket_bytes(100).first_bucket_bytes(40);
        let overlap = Overlap::new(group, config)?;
        let layers = Layers::on(Device::flex()).layer(overlap.layer());
        let device = with_custom_ops(layers).serve().unwrap().autodiff();
        let seed = group.rank() as f32;
        let strategy = DdpStrategy::new(group, device.clone()).overlap(overlap.clone());
        let end = train(group, seed, &device, EPOCHS, |training, learner| {
            let training = match accumulation {
                Some(steps) => training.grads_accumulation(steps),
                None => training,
            };
            strategy.launch(training, learner)
        });
        if let Some(fault) = DdpStrategy::fault(&end.result) {
            return Err(fault.clone());
        }
        all.push(end.parameters);
    }
    Ok(serde_json::to_string(&all).unwrap())
}

#[test]
fn overlapped() {
    let whole = [alone(None), alone(Some(2))];
    for output in all_succeed("learner overlapped", 2) {
        let all: Vec<Vec<f32>> = serde_json::from_str(result(&output)).unwrap();
        for (parameters, whole) in all.iter().zip(&whole) {
            let error = closest(parameters, &whole.parameters);
            assert!(error < 1e-5, "{error}");
        }
    }
}

/// How often each item was loaded.
fn times(notes: &Noting, items: usize) -> Vec<usize> {
    let numbers = notes.0.lock().unwrap();
    let mut times = vec![0; items];
    numbers.iter().for_each(|number| times[*number] += 1);
    times
}

#[test]
fn other_loaders_are_sliced() {
    for (ranks, sliced) in [(2, true), (3, true), (2, false)] {
        let (train, valid) = (Noting::default(), Noting::default());
        let ends = locally(ranks, |group| {
            let loader = |notes: &Noting, len| {
                DataLoaderBuilder::new(notes.clone())
                    .batch_size(2)
                    .shuffle(7)
                    .build(items(len))
            };
            let folder = tempfile::tempdir().unwrap();
            let (log, rate) = (Log::default(), Falling::default());
            let training =
                SupervisedTraining::new(folder.path(), loader(&train, 13), loader(&valid, 7));
            let training = with_log(training, &log).num_epochs(2);
            let mut strategy = DdpStrategy::new(&group, device());
            if !sliced {
                strategy = strategy.dealt_already();
            }
            let learner = learner(Net::new(0.0, 8, &device()), rate.clone());
            let result = strategy.launch(training, learner);
            assert!(result.error.is_none());
            (
                contents(&result.model),
                rate.steps.load(Ordering::SeqCst),
                log,
            )
        });
        // In each of two epochs, each item once, or once on each rank.
        let expected = if sliced { 2 } else { 2 * ranks };
        assert_eq!(times(&train, 13), [expected; 13]);
        assert_eq!(times(&valid, 7), [expected; 7]);
        assert_eq!(ends[0].2.count("valid Accuracy"), 7 * expected);
        for (parameters, steps, _) in &ends {
            assert_eq!(*parameters, ends[0].0);
            // The most batches that a rank has: of 7 items of 13, of 5, of 13.
            let batches = if !sliced { 7 } else { [4, 3][ranks - 2] };
            assert_eq!(*steps, 2 * batches);
        }
    }
}

#[test]
fn a_loader_of_another_rank_is_refused() {
    let faults = locally(2, |group| {
        let folder = tempfile::tempdir().unwrap();
        let load = |rank| dealt(ITEMS, BATCH, DistributedSampler::new(ITEMS, rank, 2));
        let training = SupervisedTraining::new(folder.path(), load(0), load(group.rank()));
        let learner = learner(Net::new(0.0, 8, &device()), Falling::default());
        let training = with_log(training, &Log::default());
        let result = DdpStrategy::new(&group, device()).launch(training, learner);
        DdpStrategy::fault(&result).unwrap().to_string()
    });
    let problem = "the sampler is that of rank 0 of 2; expected rank 1 of 2";
    assert!(faults[1].contains(problem), "{}", faults[1]);
    assert!(faults[0].starts_with("rank 1 aborted: "), "{}", faults[0]);
    assert!(faults[0].contains(problem), "{}", faults[0]);
}
