//! Runs a [`Program`] on a device, beside its [`Model`].

use burn::{
    module::{Module, Param},
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, FloatDType, Tensor, TensorData},
};
use burn_amp::{
    Autocast, AutocastLease, Fp8State, full_precision, named,
    recipe::{AmaxReducer, DelayedScaling, Fp8Recipe},
};
use proptest::{prelude::*, test_runner::TestCaseError};
use std::{error::Error, sync::Arc};

use super::{
    Outcome,
    model::{Floats, GRADIENT, INPUT, Model, Use, WEIGHT},
    program::{Action, Forward, Program},
    reference,
};

/// A group of one, for which another rank saw larger numbers.
#[derive(Debug)]
struct Doubled;

impl AmaxReducer for Doubled {
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
        Ok(amaxes * 2.0)
    }
}

/// An output that waits for backward.
struct Waiting {
    it: Use,
    x: Tensor<2>,
    output: Tensor<2>,
    gradient: Tensor<2>,
}

struct Runner<'a> {
    program: &'a Program,
    plain: Device,
    lease: AutocastLease,
    layers: Vec<Linear>,
    model: Model,
    waiting: Vec<Waiting>,
    /// Those of the last backward, and the layers whose weights have some.
    gradients: Option<(GradientsParams, Vec<usize>)>,
    /// The layers that each input was an input of.
    inputs: Vec<Vec<usize>>,
    /// How many products have run in fp8 on this lease.
    runs: u64,
    given: Vec<u32>,
}

fn lease(program: &Program, plain: &Device) -> AutocastLease {
    let autocast = Autocast::fp8(program.recipe).unwrap();
    let autocast = match program.reduces {
        true => autocast.amax_reducer(Arc::new(Doubled)),
        false => autocast,
    };
    autocast.lease(plain.clone()).unwrap()
}

/// Normal numbers times a power of two.
fn numbers(shape: [usize; 2], size: Option<i32>, seed: u64) -> TensorData {
    let mut state = seed | 1;
    let mut uniform = || {
        state = state
            .wrapping_mul(0x5851_F42D_4C95_7F2D)
            .wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut number = || (0..4).map(|_| uniform()).sum::<f32>() - 2.0;
    let factor = size.map_or(0.0, |size| 2f32.powi(size));
    let values = (0..shape[0] * shape[1]).map(|_| number() * factor);
    TensorData::new(values.collect::<Vec<_>>(), shape)
}

fn start(program: &Program, device: &Device) -> Vec<Linear> {
    let layer = |(place, (size, frozen)): (usize, &([usize; 2], bool))| {
        let mut layer = LinearConfig::new(size[0], size[1])
            .with_bias(false)
            .init(device);
        let weight = Tensor::from_data(numbers(*size, Some(-1), place as u64), device);
        layer.weight = Param::from_tensor(weight).set_require_grad(!frozen);
        layer
    };
    program.layers.iter().enumerate().map(layer).collect()
}

/// Runs the program. With `restarts`, each checkpoint goes on on another device.
pub(super) fn run(
    program: &Program,
    plain: Device,
    restarts: bool,
) -> Result<Vec<u32>, TestCaseError> {
    let lease = lease(program, &plain);
    let layers = start(program, &lease.device().autodiff());
    let factor = if program.reduces { 2.0 } else { 1.0 };
    let mut runner = Runner {
        program,
        plain,
        lease,
        model: Model::new(program.recipe, layers.len(), factor),
        layers,
        waiting: vec![],
        gradients: None,
        inputs: vec![],
        runs: 0,
        given: vec![],
    };
    for action in &program.actions {
        runner.act(action, restarts)?;
        runner.look()?;
    }
    Ok(runner.given)
}

impl Runner<'_> {
    fn device(&self) -> Device {
        self.lease.device().autodiff()
    }

    fn act(&mut self, action: &Action, restarts: bool) -> Outcome {
        match action {
            Action::Forward(forward) => self.forward(forward),
            Action::Backward { all } => {
                let count = if *all { self.waiting.len() } else { 1 };
                let count = count.min(self.waiting.len());
                self.backward(count)
            }
            Action::Evaluate(forward) => self.evaluate(forward),
            Action::FullPrecision(forward) if self.waiting.is_empty() => {
                let (layer, x, g) = self.draw(forward);
                let linear = self.layers[layer].clone();
                full_precision(|| (linear.forward(x.require_grad()) * g).sum().backward());
                Ok(())
            }
            Action::Optimize if self.waiting.is_empty() => {
                let Some((gradients, changed)) = self.gradients.take() else {
                    return Ok(());
                };
                let layers = core::mem::take(&mut self.layers);
                self.layers = SgdConfig::new().init().step(1e-2, layers, gradients);
                for layer in changed {
                    self.model.weight_changes(layer);
                }
                Ok(())
            }
            Action::Checkpoint if self.waiting.is_empty() && restarts => {
                let record = self.layers.clone().into_record();
                let state = self.lease.fp8_state().unwrap();
                let state = serde_json::to_string(&state).unwrap();
                self.lease = lease(self.program, &self.plain);
                self.lease
                    .load_fp8_state(serde_json::from_str(&state).unwrap());
                self.layers = start(self.program, &self.device()).load_record(record);
                self.gradients = None;
                self.runs = 0;
                Ok(())
            }
            Action::Checkpoint if self.waiting.is_empty() => {
                self.gradients = None;
                Ok(())
            }
            Action::FullPrecision(_) | Action::Optimize | Action::Checkpoint => Ok(()),
        }
    }

    /// A layer, an input of it, and a gradient of its output.
    fn draw(&self, forward: &Forward) -> (usize, Tensor<2>, Tensor<2>) {
        let layer = forward.layer % self.layers.len();
        let ([d_input, d_output], _) = self.program.layers[layer];
        let tensor = |width, place: usize| {
            let seed = forward.seed.rotate_left(32 * place as u32);
            let data = numbers([forward.rows, width], forward.sizes[place], seed);
            Tensor::<2>::from_data(data, &self.device())
        };
        (layer, tensor(d_input, 0), tensor(d_output, 1))
    }

    fn apply(&self, layer: usize, x: Tensor<2>) -> Tensor<2> {
        let name = ["first", "second", "third"][layer];
        named(name, || self.layers[layer].forward(x))
    }

    fn weight(&self, layer: usize) -> Floats {
        Floats::of(self.layers[layer].weight.val().into_data())
    }

    fn forward(&mut self, forward: &Forward) -> Outcome {
        let (layer, mut x, gradient) = self.draw(forward);
        let mut it = Use {
            layer,
            input: self.inputs.len(),
            tracked: forward.tracked,
        };
        if forward.tracked {
            x = x.require_grad();
        }
        let last = self.waiting.last();
        let last = last.filter(|last| forward.same && last.x.dims() == x.dims());
        match last {
            Some(last) => {
                x = last.x.clone();
                it.input = last.it.input;
                it.tracked = last.it.tracked;
            }
            None => self.inputs.push(vec![]),
        }
        self.inputs[it.input].push(layer);
        let output = self.apply(layer, x.clone());
        self.runs += 1;
        let host = Floats::of(x.clone().into_data());
        let weight = self.weight(layer);
        let expected = self.model.forward(&it, &host, &weight, true);
        let found = Floats::of(output.clone().into_data()).values;
        self.given.extend(found.iter().map(|value| value.to_bits()));
        reference::all_near(&found, &expected, 1e-5, FloatDType::BF16)
            .map_err(|error| TestCaseError::fail(format!("output of {forward:?}: {error}")))?;
        self.waiting.push(Waiting {
            it,
            x,
            output,
            gradient,
        });
        Ok(())
    }

    fn evaluate(&mut self, forward: &Forward) -> Outcome {
        let (layer, x, _) = self.draw(forward);
        // The backward of a frozen weight needs no input, and so cannot tell an evaluation from its forward.
        if self.program.layers[layer].1 && !self.waiting.is_empty() {
            return Ok(());
        }
        let x = x.inner();
        let it = Use {
            layer,
            input: self.inputs.len(),
            tracked: false,
        };
        self.inputs.push(vec![layer]);
        let host = Floats::of(x.clone().into_data());
        let expected = self.model.forward(&it, &host, &self.weight(layer), false);
        let valid = self.layers[layer].valid();
        let name = ["first", "second", "third"][layer];
        let found = named(name, || valid.forward(x)).into_data();
        self.runs += 1;
        let found = Floats::of(found).values;
        self.given.extend(found.iter().map(|value| value.to_bits()));
        reference::all_near(&found, &expected, 1e-5, FloatDType::BF16)
            .map_err(|error| TestCaseError::fail(format!("evaluation of {forward:?}: {error}")))
    }

    /// Backward from the first outputs.
    fn backward(&mut self, count: usize) -> Outcome {
        let frozen = |layer: usize| self.program.layers[layer].1;
        let reached = |it: &Use| it.tracked || !frozen(it.layer);
        let uses: Vec<Use> = self
            .waiting
            .iter()
            .map(|waiting| waiting.it.clone())
            .collect();
        if !uses[..count].iter().any(reached) {
            self.waiting.drain(..count);
            self.keep();
            return Ok(());
        }
        let losses = self.waiting[..count].iter();
        let losses =
            losses.map(|waiting| (waiting.output.clone() * waiting.gradient.clone()).sum());
        let loss = losses.reduce(|a, b| a + b).unwrap();
        let gradients = loss.backward();
        let done: Vec<Waiting> = self.waiting.drain(..count).collect();
        for (place, waiting) in done.iter().enumerate() {
            let it = &waiting.it;
            if !reached(it) {
                continue;
            }
            let size = self.program.layers[it.layer].0;
            let mut candidates = self.inputs[it.input].clone();
            candidates.retain(|layer| self.program.layers[*layer].0 == size);
            candidates.sort();
            candidates.dedup();
            let [x, g] =
                [&waiting.x, &waiting.gradient].map(|it| Floats::of(it.clone().into_data()));
            let weight = self.weight(it.layer);
            let expected = self.model.backward(it, [&x, &weight, &g], &candidates);
            self.runs += u64::from(it.tracked) + u64::from(!frozen(it.layer));
            let others = uses[..count]
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != place);
            let others: Vec<&Use> = others.map(|(_, other)| other).collect();
            let found = [
                (
                    waiting.x.grad(&gradients),
                    it.tracked,
                    others.iter().any(|other| other.input == it.input),
                ),
                (
                    self.layers[it.layer].weight.grad(&gradients),
                    !frozen(it.layer),
                    others.iter().any(|other| other.layer == it.layer),
                ),
            ];
            for (place, (found, is_there, is_a_sum)) in found.into_iter().enumerate() {
                prop_assert_eq!(found.is_some(), is_there);
                let Some(found) = found.filter(|_| !is_a_sum) else {
                    continue;
                };
                let found = Floats::of(found.into_data()).values;
                self.given.extend(found.iter().map(|value| value.to_bits()));
                reference::all_near(&found, &expected[place], 1e-5, FloatDType::F32).map_err(
                    |error| {
                        let of = ["input", "weight"][place];
                        TestCaseError::fail(format!("gradient of {of} of {it:?}: {error}"))
                    },
                )?;
            }
        }
        let changed = uses[..count].iter().map(|it| it.layer);
        let changed = changed.filter(|layer| !frozen(*layer)).collect();
        let gradients = GradientsParams::from_grads(gradients, &self.layers);
        self.gradients = Some((gradients, changed));
        drop(done);
        self.keep();
        Ok(())
    }

    fn keep(&mut self) {
        self.model
            .keep(self.waiting.iter().map(|waiting| &waiting.it));
    }

    /// Compares the state of the device.
    fn look(&self) -> Outcome {
        let state = self.lease.fp8_state().unwrap();
        prop_assert_eq!(self.lease.report().fp8_runs(), self.runs);
        let Fp8Recipe::Delayed(recipe) = self.program.recipe else {
            prop_assert_eq!(state, Fp8State::default());
            return Ok(());
        };
        for layer in 0..self.layers.len() {
            prop_assert_eq!(
                found(&state, layer, &recipe),
                self.model
                    .histories(layer)
                    .map(|history| (history.seen, history.scale)),
                "layer {}",
                layer
            );
        }
        Ok(())
    }
}

type Seen = (Vec<f32>, Option<f32>);

/// The histories of a layer in a state, in the order of the roles.
fn found(state: &Fp8State, layer: usize, recipe: &DelayedScaling) -> [Seen; 3] {
    let state = serde_json::to_value(state).unwrap();
    let name = ["first", "second", "third"][layer];
    let layers = state["layers"].as_array().unwrap();
    let known = layers.iter().find(|it| it["layer"]["names"][0] == name);
    let mut all: [Seen; 3] = Default::default();
    for tensor in known
        .iter()
        .flat_map(|it| it["tensors"].as_array().unwrap())
    {
        let role = match tensor["role"].as_str().unwrap() {
            "Input" => INPUT,
            "Weight" => WEIGHT,
            _ => GRADIENT,
        };
        let float = |bits: &serde_json::Value| f32::from_bits(bits.as_u64().unwrap() as u32);
        let amaxes: Vec<f32> = tensor["amaxes"]
            .as_array()
            .unwrap()
            .iter()
            .map(float)
            .collect();
        assert_eq!(amaxes.len(), recipe.amax_history_len);
        let seen = amaxes.into_iter().filter(|amax| *amax != 0.0).collect();
        let learned = tensor["learned"] == true;
        all[role] = (seen, learned.then(|| float(&tensor["scale"])));
    }
    all
}
