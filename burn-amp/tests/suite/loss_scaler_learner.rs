//! Inside burn-train's `Learner`. The trait and the loop are those of burn-train 0.22.1
//! (`learner/train_val.rs`, `learner/supervised/strategies/single/epoch.rs`), without what is not
//! about gradients: compiling burn-train for this would bring its dashboard along.

use super::loss_scaler_support::{gradients, loss, problem, values};
use burn::{
    lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    module::Module,
    nn::Linear,
    optim::{
        AdamConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer, MultiGradientsParams,
    },
    tensor::{Device, Tensor},
};
use burn_amp::{LossScalerConfig, SharedLossScaler};

trait TrainStep {
    type Input;
    fn step(&self, item: Self::Input) -> GradientsParams;
    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self
    where
        Self: Module + Sized,
    {
        optim.step(lr, self, grads)
    }
}

/// As `SingleDeviceTrainEpoch::run`.
fn run<M: TrainStep + Module>(
    mut model: M,
    optim: &mut ModuleOptimizer,
    items: impl IntoIterator<Item = M::Input>,
    grad_accumulation: Option<usize>,
    mut after_step: impl FnMut(&M),
) -> M {
    let mut accumulator = GradientsAccumulator::new();
    let mut accumulation_current = 0;
    for item in items {
        let grads = model.step(item);
        let grads = match grad_accumulation {
            Some(accumulation) => {
                accumulator.accumulate(&model, grads);
                accumulation_current += 1;
                if accumulation > accumulation_current {
                    continue;
                }
                accumulation_current = 0;
                accumulator.grads()
            }
            None => grads,
        };
        model = model.optimize(optim, ModuleLearningRate::from(0.05), grads);
        after_step(&model);
    }
    model
}

/// A batch, and whether its loss overflows.
type Item = (Tensor<2>, bool);

/// Scales in `step` and unscales in `optimize`.
#[derive(Module, Debug)]
struct Net {
    linear: Linear,
    #[module(skip)]
    scaler: SharedLossScaler,
}

impl TrainStep for Net {
    type Input = Item;

    fn step(&self, (x, overflow): Item) -> GradientsParams {
        let loss = self.scaler.scale(loss(&self.linear, &x, overflow));
        GradientsParams::from_grads(loss.backward(), self)
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        let scaler = self.scaler.clone();
        scaler.step(optim, lr, self, grads).0
    }
}

/// Does everything in `step`.
#[derive(Module, Debug)]
struct StepOnly {
    linear: Linear,
    #[module(skip)]
    scaler: SharedLossScaler,
}

impl TrainStep for StepOnly {
    type Input = Item;

    fn step(&self, (x, overflow): Item) -> GradientsParams {
        let loss = loss(&self.linear, &x, overflow);
        self.scaler.gradients(loss, self).0
    }
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
    let (linear, x) = problem(&device);
    let items = || OVERFLOWS.map(|overflow| (x.clone(), overflow));
    let last_scale = 1024.0 / 8.0;

    let net = Net {
        linear: linear.clone(),
        scaler: shared(),
    };
    let mut seen = Vec::new();
    let mut optim = AdamConfig::new().init();
    let net = run(net, &mut optim, items(), None, |net| {
        seen.push(values(&net.linear))
    });
    assert_eq!(seen, expected);
    assert_eq!(net.scaler.current_scale(), last_scale);
    assert_eq!(net.scaler.with(|scaler| scaler.state().skipped), 3);

    // The optimizer is given no gradients, and leaves its state alone too.
    let net = StepOnly {
        linear,
        scaler: shared(),
    };
    let mut seen = Vec::new();
    let mut optim = AdamConfig::new().init();
    let net = run(net, &mut optim, items(), None, |net| {
        seen.push(values(&net.linear))
    });
    assert_eq!(seen, expected);
    assert_eq!(net.scaler.current_scale(), last_scale);
}

/// Two batches a step: `optimize` sees their sum, and skips it whole.
#[test]
fn a_learner_that_accumulates_checks_the_sum() {
    let device = Device::flex().autodiff();
    let (linear, x) = problem(&device);
    let net = Net {
        linear,
        scaler: shared(),
    };
    let overflows = [true, false, false, false, false, true];
    let items = overflows.map(|overflow| (x.clone(), overflow));
    let mut last = values(&net.linear);
    let mut moved = Vec::new();
    let mut optim = AdamConfig::new().init();
    let net = run(net, &mut optim, items, Some(2), |net| {
        let before = core::mem::replace(&mut last, values(&net.linear));
        moved.push(before != last);
    });
    assert_eq!(moved, [false, true, false]);
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
