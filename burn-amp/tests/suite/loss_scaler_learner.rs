//! Inside burn-train's `Learner`.

use super::{
    logged::logged,
    loss_scaler_support::{gradients, input, loss, problem, values},
};
use burn::{
    data::{
        dataloader::{DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    lr_scheduler::{
        constant::ConstantLr,
        cosine::CosineAnnealingLrSchedulerConfig,
        module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler},
    },
    module::{Module, ParamId},
    nn::Linear,
    optim::{AdamConfig, GradientsParams, ModuleOptimizer, MultiGradientsParams},
    tensor::{Device, Tensor},
};
use burn_amp::{LossScalerConfig, SharedLossScaler};
use burn_train::{
    InferenceStep, Learner, LearnerModel, SupervisedTraining, TrainOutput, TrainStep,
    logger::InMemoryMetricLogger,
};
use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// A batch, and whether its loss overflows.
type Item = (Tensor<2>, bool);

/// The values of the parameters after each call of the optimizer.
type Seen = Arc<Mutex<Vec<Vec<f32>>>>;

/// Makes the batch of [`problem`].
struct Inputs;

impl Batcher<bool, Item> for Inputs {
    fn batch(&self, items: Vec<bool>, device: &Device) -> Item {
        (input(device), items[0])
    }
}

/// Trains for an epoch of one batch for each item.
fn train<M>(model: M, overflows: &[bool], accumulation: Option<usize>) -> M
where
    M: LearnerModel + TrainStep<Input = Item> + InferenceStep<Input = Item>,
{
    let loader = |overflows: &[bool]| {
        let dataset = InMemDataset::new(overflows.to_vec());
        DataLoaderBuilder::new(Inputs).batch_size(1).build(dataset)
    };
    let folder = tempfile::tempdir().unwrap();
    let training = SupervisedTraining::new(folder.path(), loader(overflows), loader(&[false]))
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_application_logger(None);
    let training = match accumulation {
        Some(steps) => training.grads_accumulation(steps),
        None => training,
    };
    let optimizer = AdamConfig::new().init();
    let result = training.launch(Learner::new(model, optimizer, ConstantLr::new(0.05)));
    assert!(result.error.is_none());
    result.model
}

/// Scales in `step` and unscales in `optimize`.
#[derive(Module, Debug)]
struct Net {
    linear: Linear,
    #[module(skip)]
    scaler: SharedLossScaler,
    #[module(skip)]
    seen: Seen,
}

impl Net {
    fn new(linear: Linear) -> Self {
        Self {
            linear,
            scaler: shared(),
            seen: Seen::default(),
        }
    }
}

impl TrainStep for Net {
    type Input = Item;
    type Output = ();

    fn step(&self, (x, overflow): Item) -> TrainOutput<()> {
        let loss = self.scaler.scale(loss(&self.linear, &x, overflow));
        TrainOutput::new(self, loss.backward(), ())
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        let scaler = self.scaler.clone();
        let net = scaler.step(optim, lr, self, grads).0;
        net.seen.lock().unwrap().push(values(&net.linear));
        net
    }
}

impl InferenceStep for Net {
    type Input = Item;
    type Output = ();

    fn step(&self, _item: Item) {}
}

/// Does everything in `step`.
#[derive(Module, Debug)]
struct StepOnly {
    linear: Linear,
    #[module(skip)]
    scaler: SharedLossScaler,
    #[module(skip)]
    seen: Seen,
}

impl TrainStep for StepOnly {
    type Input = Item;
    type Output = ();

    fn step(&self, (x, overflow): Item) -> TrainOutput<()> {
        let loss = loss(&self.linear, &x, overflow);
        let grads = self.scaler.gradients(loss, self).0;
        TrainOutput { grads, item: () }
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        let net = optim.step(lr, self, grads);
        net.seen.lock().unwrap().push(values(&net.linear));
        net
    }
}

impl InferenceStep for StepOnly {
    type Input = Item;
    type Output = ();

    fn step(&self, _item: Item) {}
}

const OVERFLOWS: [bool; 6] = [true, false, false, true, true, false];

fn shared() -> SharedLossScaler {
    let config = LossScalerConfig::new().with_init_scale(1024.0);
    config.init().unwrap().into()
}

/// The parameters after each step without scaling: where a step is skipped, those of before.
fn control(overflows: &[bool], device: &Device) -> Vec<Vec<f32>> {
    let (mut model, x) = problem(device);
    let mut optim = AdamConfig::new().init();
    let step = |overflow: &bool| {
        if !overflow {
            let grads = gradients(loss(&model, &x, false), &model);
            model = optim.step(0.05, model.clone(), grads);
        }
        values(&model)
    };
    overflows.iter().map(step).collect()
}

#[test]
fn a_learner_skips_what_overflows() {
    let device = Device::flex().autodiff();
    let expected = control(&OVERFLOWS, &device);
    let (linear, _) = problem(&device);
    let last_scale = 1024.0 / 8.0;

    let net = train(Net::new(linear.clone()), &OVERFLOWS, None);
    assert_eq!(*net.seen.lock().unwrap(), expected);
    assert_eq!(net.scaler.current_scale(), last_scale);
    assert_eq!(net.scaler.with(|scaler| scaler.state().skipped), 3);

    // The optimizer is given no gradients, and leaves its state alone too.
    let net = StepOnly {
        linear,
        scaler: shared(),
        seen: Seen::default(),
    };
    let net = train(net, &OVERFLOWS, None);
    assert_eq!(*net.seen.lock().unwrap(), expected);
    assert_eq!(net.scaler.current_scale(), last_scale);
}

/// Two batches a step: `optimize` sees their sum, and skips it whole.
#[test]
fn a_learner_that_accumulates_checks_the_sum() {
    let device = Device::flex().autodiff();
    let (linear, _) = problem(&device);
    let mut last = values(&linear);
    let overflows = [true, false, false, false, false, true];
    let net = train(Net::new(linear), &overflows, Some(2));
    let seen = net.seen.lock().unwrap().clone();
    let moved = seen.into_iter().map(|values| {
        let before = core::mem::replace(&mut last, values);
        before != last
    });
    assert_eq!(moved.collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(net.scaler.current_scale(), 256.0);
}

/// As `TrainStep::optimize_multi`: the gradients of two devices, one sum, one decision.
#[test]
fn gradients_of_several_devices_skip_together() {
    let device = Device::flex().autodiff();
    let (mut model, x) = problem(&device);
    let (mut control, _) = problem(&device);
    let scaler = shared();
    let (mut optim, mut control_optim) = (AdamConfig::new().init(), AdamConfig::new().init());
    for overflow in [false, true, false] {
        let before = values(&model);
        let parts = |scaled: bool, model: &Linear| {
            let part = |overflow| {
                let loss = loss(model, &x, overflow);
                let loss = if scaled { scaler.scale(loss) } else { loss };
                (gradients(loss, model), device.clone().inner())
            };
            let grads = vec![part(false), part(overflow)];
            MultiGradientsParams { grads }
        };
        let grads = parts(true, &model);
        let step;
        (model, step) = scaler.step_multi(&mut optim, 0.05, model, grads);
        assert_eq!(step.overflow.is_some(), overflow);
        if overflow {
            assert_eq!(values(&model), before);
        } else {
            let grads = parts(false, &control);
            control = control_optim.step_multi(0.05, control, grads);
        }
        assert_eq!(values(&model), values(&control));
    }
    assert_eq!(scaler.current_scale(), 512.0);
}

/// Stopped after an epoch and resumed from its checkpoint by a new model and a new scaler, training goes on as it was.
#[test]
fn a_resumed_learner_goes_on_with_its_scale() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().unwrap();
    let loader = |overflows: &[bool]| {
        let dataset = InMemDataset::new(overflows.to_vec());
        DataLoaderBuilder::new(Inputs).batch_size(1).build(dataset)
    };
    let launch = |epochs: usize, from: Option<usize>| {
        let net = Net::new(problem(&device).0);
        let schedule = net.scaler.saved_with(ConstantLr::new(0.05));
        let learner = Learner::new(net.clone(), AdamConfig::new().init(), schedule);
        let (train, valid) = (loader(&OVERFLOWS), loader(&[false]));
        let training = SupervisedTraining::new(folder.path(), train, valid)
            .with_metric_logger(InMemoryMetricLogger::new())
            .with_application_logger(None)
            .with_default_checkpointers()
            .num_epochs(epochs);
        let training = match from {
            Some(epoch) => training.checkpoint(epoch),
            None => training,
        };
        assert!(training.launch(learner).error.is_none());
        let seen = net.seen.lock().unwrap().clone();
        (seen, net.scaler.with(|scaler| scaler.state().clone()))
    };
    let (seen, state) = launch(2, None);
    assert_eq!((state.steps, state.skipped), (12, 6));
    let (last, resumed) = launch(2, Some(1));
    assert_eq!(last, seen[OVERFLOWS.len()..]);
    assert_eq!(resumed, state);
}

/// Checkpoints of a schedule alone load, and say what they lack; it loads theirs. The rates are those of the schedule.
#[test]
fn schedules_load_with_and_without_a_scaler() {
    let cosine = || {
        let cosine = CosineAnnealingLrSchedulerConfig::new(1.0, 10);
        cosine.init().unwrap()
    };
    let rate = |schedule: &mut ModuleLrScheduler| {
        let rates = schedule.step();
        let of = rates.lr_from_param(ParamId::new(), Some("linear.weight"));
        assert_eq!(rates.base(), of);
        of
    };
    let scaler = shared();
    let (mut plain, mut saved) = (cosine(), scaler.saved_with(cosine()));
    for _ in 0..3 {
        assert_eq!(rate(&mut plain), rate(&mut saved));
    }
    scaler.with(|scaler| scaler.update(true));

    let new = shared();
    let load = |record| new.saved_with(cosine()).load_record(record);
    let warned = logged(|| drop(load(plain.to_record())));
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(
        warned[0].contains("goes on with the scale 1024"),
        "{warned:?}"
    );
    assert_eq!(logged(|| drop(load(saved.to_record()))), [""; 0]);
    assert_eq!(new.current_scale(), 512.0);
    let mut without = cosine().load_record(saved.to_record());
    let mut both = load(saved.to_record());
    let next = rate(&mut plain);
    assert_eq!([&mut without, &mut both, &mut saved].map(rate), [next; 3]);
}

/// Clones share: a copy of the model on another thread sees the scale fall.
#[test]
fn clones_share_the_scaler() {
    let scaler = shared();
    let clone = scaler.clone();
    std::thread::spawn(move || clone.with(|scaler| scaler.update(true)))
        .join()
        .unwrap();
    assert_eq!(scaler.current_scale(), 512.0);
}

/// Another thread may change the scale during backward. Scales are powers of two, so that all divide exactly.
#[test]
fn gradients_are_divided_by_the_scale_that_their_loss_had() {
    let (model, x) = problem(&Device::flex().autodiff());
    let exact = gradients(loss(&model, &x, false), &model);
    let exact = exact.get::<2>(model.weight.id).unwrap().into_data();
    let of_scale = |scale| LossScalerConfig::new().with_init_scale(scale).init();
    let scaler = SharedLossScaler::from(of_scale(1024.0).unwrap());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for scale in [2048.0, 1024.0].into_iter().cycle() {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                scaler.with(|scaler| *scaler = of_scale(scale).unwrap());
                // A lock that is taken again at once is never free for others.
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        let (mut steps, mut scales) = (Vec::new(), HashSet::new());
        while steps.len() < 200 || scales.len() < 2 {
            let (found, step) = scaler.gradients(loss(&model, &x, false), &model);
            scales.insert(step.scale.to_bits());
            steps.push((found, step));
        }
        done.store(true, Ordering::Relaxed);
        for (found, step) in steps {
            assert_eq!(step.overflow, None);
            let found = found.get::<2>(model.weight.id).unwrap().into_data();
            assert_eq!(found, exact, "at the scale {}", step.scale);
        }
    });
}
