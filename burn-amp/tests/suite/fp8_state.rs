//! Delayed scaling's histories: over a checkpoint, and over ranks.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Tensor, TensorData},
};
use burn_amp::{
    Autocast, AutocastLease, Fp8State, named,
    recipe::{AmaxReducer, CurrentScaling, DelayedScaling},
};
use std::{
    error::Error,
    sync::{Arc, Barrier, Mutex},
    thread,
};

/// Two layers of one size, and one between them in a block.
#[derive(Module, Debug)]
struct Model {
    first: Linear,
    middle: Linear,
    last: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        let linear = |size: [usize; 2], phase: f32| {
            let mut linear = LinearConfig::new(size[0], size[1])
                .with_bias(false)
                .init(device);
            let weight = wave(size, phase, device).set_require_grad(device.is_autodiff());
            linear.weight = linear.weight.map(|_| weight);
            linear
        };
        Self {
            first: linear([16, 32], 0.3),
            middle: linear([32, 16], 0.5),
            last: linear([16, 32], 0.7),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.first.forward(x);
        let x = named("middle", || self.middle.forward(x));
        self.last.forward(x)
    }

    fn loss(&self, step: usize, device: &Device) -> Tensor<1> {
        let size = [1.0, 0.2, 30.0, 5.0, 0.7, 90.0][step];
        let x = wave([ROWS, 16], 0.2 + step as f32, device) * size;
        let gradient = wave([ROWS, 32], 0.9 + step as f32, device) * (size * 1e-3);
        (self.forward(x) * gradient).sum()
    }

    fn step(self, step: usize, device: &Device) -> Self {
        let gradients = self.loss(step, device).backward();
        let gradients = GradientsParams::from_grads(gradients, &self);
        SgdConfig::new().init().step(1e-1, self, gradients)
    }

    fn weights(&self) -> Vec<u32> {
        let weights = [&self.first, &self.middle, &self.last];
        let values = weights.map(|layer| layer.weight.val().into_data().try_to_vec::<f32>());
        values
            .into_iter()
            .flat_map(Result::unwrap)
            .map(f32::to_bits)
            .collect()
    }
}

const ROWS: usize = 6;

fn wave(shape: [usize; 2], step: f32, device: &Device) -> Tensor<2> {
    let number = |place: usize| (place as f32 * step).sin() * (place % 7 + 1) as f32 / 4.0;
    let numbers = (0..shape[0] * shape[1]).map(number).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

fn recipe() -> DelayedScaling {
    DelayedScaling::new().with_amax_history_len(3)
}

fn lease(autocast: Autocast) -> (AutocastLease, Device) {
    let lease = autocast.lease(Device::flex()).unwrap();
    let device = lease.device().autodiff();
    (lease, device)
}

/// With an interval; with a pass of evaluation before the checkpoint, by which the weight is cast already; and with an older clone,
/// whose weight stays cast.
#[test]
fn a_resumed_run_continues_bit_for_bit() {
    for (interval, evaluates, keeps) in [
        (1, false, false),
        (1, true, false),
        (2, true, false),
        (1, false, true),
        (2, true, true),
    ] {
        let autocast = || Autocast::fp8(recipe().with_interval(interval)).unwrap();
        let (before, device) = lease(autocast());
        let mut model = Model::new(&device);
        let mut older = None;
        for step in 0..3 {
            older = keeps.then(|| model.clone());
            model = model.step(step, &device);
        }
        for model in [evaluates.then_some(&model), older.as_ref()] {
            let x = wave([ROWS, 16], 0.1, &before.device()) * 300.0;
            model.map(|model| model.valid().forward(x).into_data());
        }
        let record = model.clone().into_record();
        let state = serde_json::to_string(&before.fp8_state().unwrap()).unwrap();
        drop(older);
        for step in 3..6 {
            model = model.step(step, &device);
        }

        let resumed = |state: Option<Fp8State>| {
            let (after, device) = lease(autocast());
            if let Some(state) = state {
                assert_eq!(state.layers(), 3);
                after.load_fp8_state(state.clone());
                // Nothing ran yet.
                assert_eq!(after.fp8_state().unwrap(), state);
                assert_eq!(after.fp8_layers_waiting().unwrap(), 3);
            }
            let mut model = Model::new(&device).load_record(record.clone());
            for step in 3..6 {
                model = model.step(step, &device);
            }
            assert_eq!(after.fp8_layers_waiting().unwrap(), 0);
            (model.weights(), after.fp8_state().unwrap())
        };
        let state: Fp8State = serde_json::from_str(&state).unwrap();
        let expected = (model.weights(), before.fp8_state().unwrap());
        let case = format!("{interval} {evaluates} {keeps}");
        assert_eq!(resumed(Some(state)), expected, "{case}");
        assert_ne!(resumed(None), expected);
    }
}

#[test]
fn layers_that_are_gone_leave_no_state() {
    let lease = Autocast::fp8(recipe())
        .unwrap()
        .lease(Device::flex())
        .unwrap();
    let device = lease.device();
    let run = || {
        let model = Model::new(&device);
        model.loss(0, &device).into_data();
        model
    };
    drop(run());
    let model = run();
    assert_eq!(lease.fp8_state().unwrap().layers(), 3);
    drop(model);
    let current = Autocast::fp8(CurrentScaling::new()).unwrap();
    let current = current.with_report(Device::flex()).unwrap();
    Model::new(&current.device)
        .loss(0, &current.device)
        .into_data();
    assert_eq!(current.fp8_state().unwrap(), Fp8State::default());
    let device = Autocast::bf16().with_report(Device::flex()).unwrap();
    device.load_fp8_state(Fp8State::default());
    assert_eq!(device.fp8_state().unwrap().layers(), 0);
}

#[test]
fn layers_of_another_model_wait() {
    let (before, device) = lease(Autocast::fp8(recipe()).unwrap());
    let model = Model::new(&device);
    model.loss(0, &device).into_data();
    let state = before.fp8_state().unwrap();
    let (after, device) = lease(Autocast::fp8(recipe()).unwrap());
    after.load_fp8_state(state);
    let linear = LinearConfig::new(48, 80).init(&device);
    linear.forward(wave([16, 48], 0.1, &device)).into_data();
    assert_eq!(after.fp8_layers_waiting().unwrap(), 3);
}

/// A history of another length keeps its newest amaxes, as `Fp8Linear`'s does.
#[test]
fn a_state_serves_other_lengths() {
    let state = |length: usize, start: Option<Fp8State>| {
        let (lease, device) = lease(Autocast::fp8(recipe().with_amax_history_len(length)).unwrap());
        let steps = match start {
            Some(state) => {
                lease.load_fp8_state(state);
                2..3
            }
            None => 0..3,
        };
        let model = Model::new(&device);
        for step in steps {
            model.loss(step, &device).backward();
        }
        lease.fp8_state().unwrap()
    };
    let (after_two, device) = lease(Autocast::fp8(recipe().with_amax_history_len(5)).unwrap());
    let model = Model::new(&device);
    for step in 0..2 {
        model.loss(step, &device).backward();
    }
    let before = after_two.fp8_state().unwrap();
    for length in [2, 3, 5, 8] {
        assert_eq!(
            state(length, Some(before.clone())),
            state(length, None),
            "{length}"
        );
    }
}

/// Ranks as threads: the largest amaxes of all.
#[derive(Debug)]
struct Group {
    barrier: Barrier,
    largest: Mutex<Vec<f32>>,
    calls: Mutex<usize>,
}

const RANKS: usize = 2;

impl AmaxReducer for Group {
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
        let own = amaxes.to_data().try_to_vec::<f32>()?;
        {
            let mut largest = self.largest.lock().unwrap();
            largest.resize(own.len(), 0.0);
            for (largest, own) in largest.iter_mut().zip(own) {
                *largest = largest.max(own);
            }
        }
        self.barrier.wait();
        let all = self.largest.lock().unwrap().clone();
        if self.barrier.wait().is_leader() {
            self.largest.lock().unwrap().clear();
            *self.calls.lock().unwrap() += 1;
        }
        self.barrier.wait();
        Ok(Tensor::from_data(
            TensorData::from(&all[..]),
            &amaxes.device(),
        ))
    }
}

/// Ranks that share amaxes have the histories of one process with all rows. (One layer: in the first step, whose scales are each
/// rank's own, the next one's input would be rounded differently.)
#[test]
fn ranks_share_scales() {
    let run = |autocast: Autocast, rows: core::ops::Range<usize>, evaluates: bool| {
        let (lease, device) = lease(autocast);
        let layer = Model::new(&device).first;
        for step in 0..4 {
            if evaluates {
                let x = wave([ROWS, 16], 0.1, &lease.device()) * 1e4;
                layer.valid().forward(x).into_data();
            }
            let part = |shape, phase: f32, size: f32| {
                wave(shape, phase + step as f32, &device).slice(rows.clone()) * size
            };
            let size = [1.0, 30.0, 0.2, 5.0][step];
            let output = layer.forward(part([ROWS, 16], 0.2, size));
            let loss = (output * part([ROWS, 32], 0.9, size * 1e-3)).sum();
            layer.weight.grad(&loss.backward()).unwrap().into_data();
        }
        lease.fp8_state().unwrap()
    };
    let autocast = || Autocast::fp8(recipe()).unwrap();
    let whole = run(autocast(), 0..ROWS, false);
    // An evaluation changes nothing, with others or without.
    assert_eq!(run(autocast(), 0..ROWS, true), whole);
    let half = |rank: usize| rank * ROWS / RANKS..(rank + 1) * ROWS / RANKS;
    let group = Arc::new(Group {
        barrier: Barrier::new(RANKS),
        largest: Mutex::default(),
        calls: Mutex::default(),
    });
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            let autocast = autocast().amax_reducer(group.clone());
            // One of them evaluates in between.
            thread::spawn(move || run(autocast, half(rank), rank == 0))
        })
        .collect();
    for rank in ranks {
        assert_eq!(rank.join().unwrap(), whole);
    }
    // One call a pass.
    assert_eq!(*group.calls.lock().unwrap(), 4);
    assert_ne!(run(autocast(), half(0), false), whole);
}

/// A group that fails, each in its way.
#[derive(Debug)]
enum Broken {
    Gone,
    OnAnotherDevice,
    OfAnotherShape,
}

impl AmaxReducer for Broken {
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
        match self {
            Broken::Gone => Err("the second rank is gone".into()),
            Broken::OnAnotherDevice => {
                let device = Autocast::bf16().device(Device::flex())?;
                Ok(Tensor::from_data(amaxes.into_data(), &device))
            }
            Broken::OfAnotherShape => Ok(amaxes.repeat(&[2])),
        }
    }
}

/// The device goes on, as its thread is not the one to stop the program.
#[test]
fn a_reducer_that_fails_is_heard() {
    for (broken, expected) in [
        (Broken::Gone, "the second rank is gone"),
        (Broken::OnAnotherDevice, "the reducer's answer is"),
        (Broken::OfAnotherShape, "the reducer's answer is"),
    ] {
        let autocast = Autocast::fp8(recipe()).unwrap();
        let (lease, device) = lease(autocast.amax_reducer(Arc::new(broken)));
        let model = Model::new(&device);
        assert_eq!(lease.fp8_state().unwrap(), Fp8State::default());
        for step in 0..2 {
            let gradients = model.loss(step, &device).backward();
            let gradient = model.first.weight.grad(&gradients).unwrap();
            let gradient = gradient.into_data().try_to_vec::<f32>().unwrap();
            assert!(gradient.iter().all(|value| value.is_finite()));
        }
        let error = lease.fp8_state().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
