//! burn-train's `Learner` over ranks, against itself in one process on the whole batch.

mod program;
mod stops;

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use burn::{
    backend::Flex,
    data::dataloader::DataLoaderBuilder,
    tensor::{DType, Device, Int, Tensor, TensorData},
};
use burn_ddp::{
    DdpConfig, DdpError, DdpStrategy, DistributedSampler, GatherOutput, Overlap, ProcessGroup,
    custom_ops,
};
use burn_layer::Layers;
use burn_train::{
    ClassificationOutput, Learner, LearningResult, MultiLabelClassificationOutput,
    RegressionOutput, SequenceOutput, SupervisedTraining, TrainingStrategy,
    checkpoint::KeepLastNCheckpoints,
};

use self::program::{
    BATCH, Falling, HELD_OUT, ITEMS, Log, Net, Noting, dealt, items, learner, training, with_log,
};
pub(crate) use self::stops::train_for_ever;
use crate::{
    ddp::{closest, contents, results},
    ranks::{locally, over_tcp},
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

/// Played by processes, since each needs a layered device of its own: see [`overlapped`].
pub(crate) fn train_overlapped(group: &ProcessGroup) -> Result<String, DdpError> {
    let mut all = Vec::new();
    for accumulation in [None, Some(2)] {
        let config = DdpConfig::new().bucket_bytes(100).first_bucket_bytes(40);
        let overlap = Overlap::new(group, config)?;
        let device = Layers::on(Device::flex())
            .layer(overlap.layer())
            .custom_ops::<Flex>(custom_ops::<Flex>())
            .serve()
            .unwrap()
            .autodiff();
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
    for (success, output) in results("learner overlapped", 2) {
        assert!(success, "{output}");
        let (_, text) = output.split_once("RESULT ok ").unwrap();
        let all: Vec<Vec<f32>> = serde_json::from_str(text.lines().next().unwrap()).unwrap();
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
    let problem = "the loader's sampler is that of rank 0 of 2; expected rank 1 of 2";
    assert!(faults[1].contains(problem), "{}", faults[1]);
    assert!(faults[0].starts_with("rank 1 aborted: "), "{}", faults[0]);
    assert!(faults[0].contains(problem), "{}", faults[0]);
}

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
                    let mut training = training
                        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
                        .with_custom_checkpointers(
                            Guarded::new(&group, shared.path(), "model"),
                            Guarded::new(&group, shared.path(), "optim"),
                            Guarded::new(&group, shared.path(), "scheduler"),
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

/// burn-train's own checkpointer, which only rank 0 may write with.
struct Guarded {
    main: bool,
    files: burn_train::checkpoint::FileCheckpointer,
}

impl Guarded {
    fn new(group: &ProcessGroup, folder: &std::path::Path, name: &str) -> Self {
        Self {
            main: group.is_main(),
            files: burn_train::checkpoint::FileCheckpointer::new(folder, name),
        }
    }
}

impl<R: burn_train::checkpoint::Checkpoint> burn_train::checkpoint::Checkpointer<R> for Guarded {
    fn save(
        &self,
        epoch: usize,
        record: R,
    ) -> Result<(), burn_train::checkpoint::CheckpointerError> {
        assert!(self.main, "only rank 0 writes");
        // Slow disks are waited for.
        std::thread::sleep(std::time::Duration::from_millis(50));
        self.files.save(epoch, record)
    }

    fn delete(&self, epoch: usize) -> Result<(), burn_train::checkpoint::CheckpointerError> {
        assert!(self.main, "only rank 0 deletes");
        burn_train::checkpoint::Checkpointer::<R>::delete(&self.files, epoch)
    }

    fn restore(&self, epoch: usize) -> Result<R, burn_train::checkpoint::CheckpointerError> {
        self.files.restore(epoch)
    }
}

fn data<const N: usize>(shape: [usize; N], dtype: DType) -> TensorData {
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|it: usize| it as f32)
        .collect();
    TensorData::new(values, shape).convert_dtype(dtype)
}

#[test]
fn outputs_survive_the_journey() {
    let device = Device::flex();
    let loss = || Tensor::<1>::from_data(data([1], DType::F32), &device);
    let float = |shape: [usize; 2]| Tensor::<2>::from_data(data(shape, DType::F32), &device);
    let ints = || Tensor::<2, Int>::from_data(data([2, 3], DType::I32), (&device, DType::I32));
    fn journey<T: GatherOutput>(output: T, device: &Device) -> [Vec<TensorData>; 2] {
        let sent = output.into_parts().unwrap();
        let arrived = T::from_parts(sent.clone(), device).into_parts().unwrap();
        [sent, arrived]
    }
    let classes = Tensor::<1, Int>::from_data(data([2], DType::I64), (&device, DType::I64));
    let logits = || Tensor::<3>::from_data(data([2, 3, 4], DType::F32), &device);
    let journeys = [
        journey(
            ClassificationOutput::new(loss(), float([2, 3]), classes),
            &device,
        ),
        journey(
            MultiLabelClassificationOutput::new(loss(), float([2, 3]), ints()),
            &device,
        ),
        journey(
            RegressionOutput::new(loss(), float([2, 1]), float([2, 1])),
            &device,
        ),
        journey(SequenceOutput::new(loss(), logits(), None, ints()), &device),
        journey(
            SequenceOutput::new(loss(), logits(), Some(ints()), ints()),
            &device,
        ),
    ];
    let lens = journeys.each_ref().map(|[sent, _]| sent.len());
    assert_eq!(lens, [3, 3, 3, 3, 4]);
    for [sent, arrived] in journeys {
        assert_eq!(sent, arrived);
    }
    assert_eq!(journey((), &device), [vec![], vec![]]);
}

/// A renderer that counts what it is told.
#[derive(Clone, Default)]
struct Counting(Arc<AtomicUsize>);

impl Counting {
    fn count(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl burn_train::renderer::MetricsRendererTraining for Counting {
    fn update_train(&mut self, _state: burn_train::renderer::MetricState) {
        self.count();
    }

    fn update_valid(&mut self, _state: burn_train::renderer::MetricState) {
        self.count();
    }
}

impl burn_train::renderer::MetricsRendererEvaluation for Counting {
    fn update_test(
        &mut self,
        _name: burn_train::renderer::EvaluationName,
        _state: burn_train::renderer::MetricState,
    ) {
        self.count();
    }
}

impl burn_train::renderer::MetricsRenderer for Counting {
    fn manual_close(&mut self) {
        self.count();
    }

    fn register_metric(&mut self, _definition: burn_train::metric::MetricDefinition) {
        self.count();
    }
}

impl burn_train::logger::TrainingProgressLogger for Counting {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {
        self.count();
    }

    fn update_epoch(&mut self, _: usize) {
        self.count();
    }

    fn start_split(&mut self, _: &str, _: usize) {
        self.count();
    }

    fn update_split(&mut self, _: usize) {
        self.count();
    }

    fn end_split(&mut self) {
        self.count();
    }

    fn end(&mut self) {
        self.count();
    }

    fn log_event_training(&mut self, _: String) {
        self.count();
    }
}

impl burn_train::logger::EvaluationProgressLogger for Counting {
    fn start_global_progress(&mut self, _: usize) {
        self.count();
    }

    fn start_test(&mut self, _: &str, _: usize) {
        self.count();
    }

    fn update_test_progress(&mut self, _: usize) {
        self.count();
    }

    fn end_test(&mut self) {
        self.count();
    }

    fn end_global_progress(&mut self) {
        self.count();
    }

    fn log_event_evaluation(&mut self, _: String) {
        self.count();
    }
}

#[test]
fn rank_0_alone_renders() {
    let counts = Mutex::new([0; 3]);
    locally(3, |group| {
        let renderer = Counting::default();
        let told = renderer.0.clone();
        // Even if burn-train was given a renderer, and the strategy the hard way.
        train(&group, 0.0, &device(), 2, |training, learner| {
            let strategy = Arc::new(DdpStrategy::new(&group, device()));
            training
                .renderer(Box::new(renderer))
                .with_training_strategy(TrainingStrategy::Custom(strategy))
                .launch(learner)
        });
        counts.lock().unwrap()[group.rank()] = told.load(Ordering::SeqCst);
    });
    let [main, others @ ..] = counts.into_inner().unwrap();
    // Each of 2 x (3 + 3) batches of 3 ranks has been shown, with 2 metrics.
    assert!(main >= 2 * 3 * 3 * 2, "{main}");
    assert_eq!(others, [0, 0]);
}
