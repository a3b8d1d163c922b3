//! A small program of burn-train, and what there is to see of its run.

use std::{
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use burn::{
    data::{
        dataloader::{DataLoader, batcher::Batcher},
        dataset::InMemDataset,
    },
    lr_scheduler::{LrScheduler, LrSchedulerRecord},
    module::Module,
    nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig},
    optim::{RecordState, SgdConfig, StateSink, StateSource, momentum::MomentumConfig},
    tensor::{Device, Int, Tensor, TensorData, activation::relu},
};
use burn_ddp::{DistributedLoader, DistributedSampler, ProcessGroup};
use burn_train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
    logger::MetricLogger,
    metric::{
        AccuracyMetric, LossMetric, MetricDefinition, NumericEntry,
        store::{EpochSummary, MetricsUpdate, Split},
    },
};

/// Items of the training set: three steps of an epoch with the batch of all ranks.
pub(crate) const ITEMS: usize = 36;
pub(crate) const BATCH: usize = 12;
/// No multiple of any number of ranks.
pub(crate) const HELD_OUT: usize = 11;

#[derive(Module, Debug)]
pub(crate) struct Net {
    hidden: Linear,
    head: Linear,
}

impl Net {
    /// All start with the same parameters if `seed` is the same.
    pub(crate) fn new(seed: f32, hidden: usize, device: &Device) -> Self {
        let linear = |inputs: usize, outputs: usize, phase: f32| {
            let mut linear = LinearConfig::new(inputs, outputs).init(device);
            let values: Vec<f32> = (0..inputs * outputs)
                .map(|index| (index as f32 * 1.7 + phase + seed).sin() * 0.5)
                .collect();
            linear.weight = linear.weight.map(|_| {
                let data = TensorData::new(values, [inputs, outputs]);
                Tensor::from_data(data, device).require_grad()
            });
            linear.bias = linear
                .bias
                .map(|bias| bias.map(|bias| bias.zeros_like().require_grad()));
            linear
        };
        Self {
            hidden: linear(4, hidden, 1.0),
            head: linear(hidden, 3, 2.0),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) number: usize,
    features: [f32; 4],
    class: i32,
}

pub(crate) fn items(len: usize) -> InMemDataset<Item> {
    let item = |number: usize| {
        let features = std::array::from_fn(|at| ((number * 5 + at * 3) as f32 * 0.7).sin());
        Item {
            number,
            features,
            class: ((features[0] > 0.0) as i32) + ((features[1] > 0.2) as i32),
        }
    };
    InMemDataset::new((0..len).map(item).collect())
}

#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) features: Tensor<2>,
    classes: Tensor<1, Int>,
}

/// Makes batches, and notes of which items.
#[derive(Clone, Default)]
pub(crate) struct Noting(pub(crate) Arc<Mutex<Vec<usize>>>);

impl Batcher<Item, Batch> for Noting {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Batch {
        let numbers = items.iter().map(|item| item.number);
        self.0.lock().unwrap().extend(numbers);
        let features: Vec<f32> = items.iter().flat_map(|item| item.features).collect();
        let classes: Vec<i32> = items.iter().map(|item| item.class).collect();
        let len = items.len();
        Batch {
            features: Tensor::from_data(TensorData::new(features, [len, 4]), device),
            classes: Tensor::from_data(TensorData::new(classes, [len]), device),
        }
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        let output = self.head.forward(relu(self.hidden.forward(batch.features)));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.classes.clone());
        ClassificationOutput::new(loss, output, batch.classes)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

/// A learning rate that falls from step to step, and says how many there were.
#[derive(Clone)]
pub(crate) struct Falling {
    start: f64,
    /// Resumed with a checkpoint.
    taken: u64,
    pub(crate) steps: Arc<AtomicUsize>,
}

impl Default for Falling {
    fn default() -> Self {
        Self::from(0.2)
    }
}

impl Falling {
    /// From 0, nothing moves.
    pub(crate) fn from(start: f64) -> Self {
        Self {
            start,
            taken: 0,
            steps: Arc::default(),
        }
    }
}

impl LrScheduler for Falling {
    fn step(&mut self) -> f64 {
        self.steps.fetch_add(1, Ordering::SeqCst);
        self.taken += 1;
        self.start / (1.0 + self.taken as f64 * 0.1)
    }

    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::from_state(&Taken(self.taken))
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        let Taken(taken) = record.into_state().unwrap();
        self.taken = taken;
    }
}

/// Steps taken, in a record.
struct Taken(u64);

impl RecordState for Taken {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_scalar(prefix, "taken", self.0.into());
    }

    fn state_unflatten(prefix: &str, from: &mut StateSource, _device: &Device) -> Option<Self> {
        let taken = from.take_scalar(prefix, "taken")?;
        Some(Self(taken.try_into().ok()?))
    }
}

pub(crate) fn learner(model: Net, rate: Falling) -> Learner<Net> {
    let momentum = MomentumConfig::new().with_momentum(0.9);
    let optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
    Learner::new(model, optimizer, rate)
}

/// The final value of each metric in each epoch, and over how many items it was taken.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<LogState>>);

#[derive(Default)]
struct LogState {
    definitions: Vec<MetricDefinition>,
    entries: Vec<(String, usize, NumericEntry)>,
}

impl Log {
    /// By split and metric, in the order of the epochs.
    pub(crate) fn finals(&self, name: &str) -> Vec<f64> {
        self.entries(name, |entry| match entry {
            NumericEntry::Final(value) => Some(*value),
            _ => None,
        })
    }

    /// The items over which a metric was taken, in all epochs.
    pub(crate) fn count(&self, name: &str) -> usize {
        let counts = self.entries(name, |entry| match entry {
            NumericEntry::Aggregated { count, .. } => Some(*count),
            _ => None,
        });
        counts.into_iter().sum()
    }

    fn entries<R>(&self, name: &str, pick: impl Fn(&NumericEntry) -> Option<R>) -> Vec<R> {
        let state = self.0.lock().unwrap();
        let named = state.entries.iter().filter(|(known, ..)| known == name);
        named.filter_map(|(_, _, entry)| pick(entry)).collect()
    }
}

impl MetricLogger for Log {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        let mut state = self.0.lock().unwrap();
        for update in update.entries_numeric {
            let id = &update.entry.metric_id;
            let definition = state.definitions.iter().find(|it| it.metric_id == *id);
            let name = format!("{split} {}", definition.unwrap().name);
            if let Some(entry) = update.numeric_entry {
                state.entries.push((name, epoch, entry));
            }
        }
    }

    fn read_numeric(
        &mut self,
        name: &str,
        epoch: usize,
        split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        let name = format!("{split} {name}");
        let state = self.0.lock().unwrap();
        let found = state
            .entries
            .iter()
            .filter(|(known, of, _)| (known, of) == (&name, &epoch));
        Ok(found.map(|(_, _, entry)| entry.clone()).collect())
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.0.lock().unwrap().definitions.push(definition);
    }

    fn log_epoch_summary(&mut self, _summary: EpochSummary) {}
}

/// A loader of our own.
pub(crate) fn dealt(
    len: usize,
    batch_size: usize,
    sampler: DistributedSampler,
) -> Arc<dyn DataLoader<Batch>> {
    let loader = DistributedLoader::new(items(len), Noting::default(), sampler);
    Arc::new(loader.batch_size(batch_size))
}

/// The training of a rank, whose share of a batch is its part of [`BATCH`].
pub(crate) fn training(
    group: &ProcessGroup,
    folder: &Path,
    log: &Log,
    epochs: usize,
) -> SupervisedTraining<Net> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let train = DistributedSampler::new(ITEMS, rank, ranks)
        .shuffle(true)
        .seed(3);
    // Padded: the strategy must not count an item twice all the same.
    let valid = DistributedSampler::new(HELD_OUT, rank, ranks);
    let train = dealt(ITEMS, BATCH / ranks, train);
    let valid = dealt(HELD_OUT, BATCH / ranks, valid);
    with_log(SupervisedTraining::new(folder, train, valid), log).num_epochs(epochs)
}

pub(crate) fn with_log(training: SupervisedTraining<Net>, log: &Log) -> SupervisedTraining<Net> {
    training
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_metric_logger(log.clone())
        .with_application_logger(None)
}
