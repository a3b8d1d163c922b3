//! Programs of burn-train on autocast devices.

use burn::{
    data::{
        dataloader::{DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    lr_scheduler::{constant::ConstantLr, module_lr_scheduler::ModuleLearningRate},
    module::Module,
    nn::{
        BatchNorm, BatchNormConfig, Linear, LinearConfig,
        conv::{Conv2d, Conv2dConfig},
        loss::CrossEntropyLossConfig,
    },
    optim::{AdamConfig, GradientsParams, ModuleOptimizer},
    store::ModuleRecord,
    tensor::{DType, Device, Int, Tensor, TensorData, activation::relu},
};
use burn_amp::{Autocast, LossScalerConfig, Op, SharedLossScaler};
use burn_train::{
    ClassificationOutput, InferenceStep, Learner, LearnerModel, SupervisedTraining, TrainOutput,
    TrainStep,
    checkpoint::KeepLastNCheckpoints,
    logger::MetricLogger,
    metric::{
        AccuracyMetric, LossMetric, MetricDefinition, NumericEntry,
        store::{EpochSummary, MetricsUpdate, Split},
    },
};
use std::{
    path::Path,
    sync::{Arc, Mutex},
};

/// The program, which knows nothing of precision.
mod program {
    use super::*;

    #[derive(Module, Debug)]
    pub(super) struct Net {
        conv: Conv2d,
        norm: BatchNorm,
        head: Linear,
    }

    impl Net {
        pub(super) fn new(device: &Device) -> Self {
            Self {
                conv: Conv2dConfig::new([1, 4], [3, 3]).init(device),
                norm: BatchNormConfig::new(4).init(device),
                head: LinearConfig::new(4 * 4 * 4, 3).init(device),
            }
        }

        pub(super) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
            let x = relu(self.norm.forward(self.conv.forward(images)));
            self.head.forward(x.flatten(1, 3))
        }
    }

    #[derive(Clone, Debug)]
    pub(super) struct Batch {
        pub(super) images: Tensor<4>,
        pub(super) classes: Tensor<1, Int>,
    }

    pub(super) struct Images;

    impl Batcher<usize, Batch> for Images {
        fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
            let len = items.len();
            let pixel = |item: usize, at: usize| {
                // Waves of three lengths, which are the classes.
                (at as f32 * (0.3 + (item % 3) as f32 * 0.5) + item as f32 * 0.1).sin()
            };
            let pixels = items
                .iter()
                .flat_map(|item| (0..36).map(|at| pixel(*item, at)));
            let pixels = TensorData::new(pixels.collect::<Vec<f32>>(), [len, 1, 6, 6]);
            let classes = items.iter().map(|item| (item % 3) as i32);
            let classes = TensorData::new(classes.collect::<Vec<i32>>(), [len]);
            Batch {
                images: Tensor::from_data(pixels, device),
                classes: Tensor::from_data(classes, device),
            }
        }
    }

    impl InferenceStep for Net {
        type Input = Batch;
        type Output = ClassificationOutput;

        fn step(&self, batch: Batch) -> ClassificationOutput {
            let output = self.forward(batch.images);
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
}

use program::{Batch, Images, Net};

/// The metrics at the end of each epoch.
#[derive(Clone, Default)]
struct Finals(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    definitions: Vec<MetricDefinition>,
    values: Vec<(String, f64)>,
}

impl Finals {
    fn of(&self, name: &str) -> Vec<f64> {
        let state = self.0.lock().unwrap();
        let named = state.values.iter().filter(|(known, _)| known == name);
        named.map(|(_, value)| *value).collect()
    }
}

impl MetricLogger for Finals {
    fn log(&mut self, update: MetricsUpdate, _epoch: usize, split: &Split) {
        let mut state = self.0.lock().unwrap();
        for update in update.entries_numeric {
            let id = &update.entry.metric_id;
            let definition = state.definitions.iter().find(|it| it.metric_id == *id);
            let name = format!("{split} {}", definition.unwrap().name);
            if let Some(NumericEntry::Final(value)) = update.numeric_entry {
                state.values.push((name, value));
            }
        }
    }

    fn read_numeric(
        &mut self,
        _name: &str,
        _epoch: usize,
        _split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        Ok(Vec::new())
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.0.lock().unwrap().definitions.push(definition);
    }

    fn log_epoch_summary(&mut self, _summary: EpochSummary) {}
}

const EPOCHS: usize = 4;

/// Trains as burn-train's examples do, with checkpoints in `folder`.
fn train<M>(model: M, folder: &Path, epochs: usize, from: Option<usize>) -> (M, Finals)
where
    M: LearnerModel
        + TrainStep<Input = Batch, Output = ClassificationOutput>
        + InferenceStep<Input = Batch, Output = ClassificationOutput>,
{
    let loader = |items: std::ops::Range<usize>| {
        DataLoaderBuilder::new(Images)
            .batch_size(12)
            .build(InMemDataset::new(items.collect()))
    };
    let finals = Finals::default();
    let mut training = SupervisedTraining::new(folder, loader(0..48), loader(48..63))
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_metric_logger(finals.clone())
        .with_application_logger(None)
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(1))
        .with_default_checkpointers()
        .num_epochs(epochs);
    if let Some(epoch) = from {
        training = training.checkpoint(epoch);
    }
    let optimizer = AdamConfig::new().init();
    let result = training.launch(Learner::new(model, optimizer, ConstantLr::new(0.02)));
    assert!(result.error.is_none(), "{:?}", result.error);
    (result.model, finals)
}

fn outputs(net: &Net, device: &Device) -> Vec<f32> {
    let Batch { images, .. } = Images.batch((0..6).collect(), device);
    net.forward(images).into_data().try_to_vec().unwrap()
}

fn near(a: &[f32], b: &[f32], tolerance: f32) {
    let largest = b
        .iter()
        .fold(0f32, |largest, value| largest.max(value.abs()));
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() < tolerance * largest, "{a} {b}");
    }
}

#[test]
fn an_unmodified_program_trains_in_bf16() {
    let autocast = Autocast::bf16().lease(Device::flex()).unwrap();
    let device = autocast.device().autodiff();
    let plain = Device::flex();
    let start = Net::new(&plain.clone().autodiff());
    let net = Net::new(&device).load_record(start.clone().into_record());
    let folder = tempfile::tempdir().unwrap();
    let (_, exact) = train(start, folder.path(), EPOCHS, None);
    let (net, finals) = train(net, folder.path(), EPOCHS, None);
    let losses = finals.of("train Loss");
    assert_eq!(losses.len(), EPOCHS);
    assert!(losses[EPOCHS - 1] < losses[0] * 0.5, "{losses:?}");
    for (loss, exact) in losses.iter().zip(exact.of("train Loss")) {
        assert!((loss - exact).abs() < 0.1, "{loss} {exact}");
    }
    // Three steps forward and backward, and validation, four times; and nothing of that in f32.
    let report = autocast.report();
    assert!(report.runs_of(Op::conv2d, DType::BF16) >= (4 * EPOCHS) as u64);
    assert_eq!(report.runs_of(Op::conv2d, DType::F32), 0);

    // A record knows nothing of it either.
    let bytes = net.clone().into_record().into_bytes().unwrap();
    let record = ModuleRecord::from_bytes(bytes).unwrap();
    let same = Net::new(&plain).load_record(record);
    let exact = outputs(&same, &plain);
    near(&outputs(&net, &autocast.device()), &exact, 0.05);
    let back = Net::new(&autocast.device()).load_record(same.into_record());
    assert_eq!(
        outputs(&back, &autocast.device()),
        outputs(&net, &autocast.device())
    );
}

#[test]
fn checkpoints_go_on_under_the_other_precision() {
    let plain = Device::flex().autodiff();
    let low = Autocast::bf16().device(Device::flex()).unwrap().autodiff();
    for (first, second) in [(&plain, &low), (&low, &plain)] {
        let folder = tempfile::tempdir().unwrap();
        let (_, before) = train(Net::new(first), folder.path(), 2, None);
        let (_, after) = train(Net::new(second), folder.path(), EPOCHS, Some(2));
        let (before, after) = (before.of("train Loss"), after.of("train Loss"));
        assert_eq!((before.len(), after.len()), (2, 2));
        // With the model and the optimizer's state, it goes on from where it was.
        assert!(after[0] < before[1], "{before:?} {after:?}");
    }
}

/// The program with loss scaling, which fp16 needs.
#[derive(Module, Debug)]
struct Scaled {
    net: Net,
    #[module(skip)]
    scaler: SharedLossScaler,
    #[module(skip)]
    skipped: Arc<Mutex<Vec<bool>>>,
}

impl InferenceStep for Scaled {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        InferenceStep::step(&self.net, batch)
    }
}

impl TrainStep for Scaled {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = InferenceStep::step(&self.net, batch);
        let loss = self.scaler.scale(output.loss.clone());
        TrainOutput::new(self, loss.backward(), output)
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        let scaler = self.scaler.clone();
        let before = weights(&self.net);
        let (model, step) = scaler.step(optim, lr, self, grads);
        let moved = weights(&model.net) != before;
        assert_eq!(
            moved,
            step.overflow.is_none(),
            "a step that overflows moves nothing"
        );
        model.skipped.lock().unwrap().push(!moved);
        model
    }
}

fn weights(net: &Net) -> Vec<f32> {
    struct Reader(Vec<f32>);
    impl burn::module::ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
            // Running statistics move in forward.
            if param.is_require_grad() {
                self.0.extend(param.val().into_data().iter::<f32>());
            }
        }
    }
    let mut reader = Reader(Vec::new());
    net.visit(&mut reader);
    assert!(!reader.0.is_empty());
    reader.0
}

#[test]
fn fp16_trains_with_a_scaler_that_skips_what_overflows() {
    let autocast = Autocast::fp16().lease(Device::flex()).unwrap();
    let device = autocast.device().autodiff();
    // A scale that no fp16 gradient bears.
    let config = LossScalerConfig::new().with_init_scale(2f64.powi(22));
    let model = Scaled {
        net: Net::new(&device),
        scaler: config.init().unwrap().into(),
        skipped: Arc::default(),
    };
    let folder = tempfile::tempdir().unwrap();
    let (model, finals) = train(model, folder.path(), 2 * EPOCHS, None);
    let skipped = model.skipped.lock().unwrap().clone();
    assert_eq!(skipped.len(), 4 * 2 * EPOCHS);
    let skips = skipped.iter().filter(|skipped| **skipped).count();
    assert!(skipped[0] && skips < 10, "{skipped:?}");
    assert!(!skipped[skipped.len() - 1]);
    // It was halved as often.
    assert_eq!(model.scaler.current_scale(), 2f32.powi(22 - skips as i32));
    let losses = finals.of("train Loss");
    assert!(losses[2 * EPOCHS - 1] < losses[0] * 0.5, "{losses:?}");
    assert!(autocast.report().runs_of(Op::conv2d, DType::F16) > 0);
}
