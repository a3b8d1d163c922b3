//! Runs a program: its iterations, backward passes and updates.

use super::{
    machine::{Machine, Seen},
    ops::Kind,
    program::{Loss, Program, Update},
    value::{Float, ask, both, each, rejoin},
};
use burn::tensor::{Device, Tensor};
use burn_amp::Op;

/// What the program sees on the device.
pub(super) fn run(program: &Program, device: &Device) -> Seen {
    let device = device.clone().autodiff();
    let device = match program.checkpointing {
        true => device.gradient_checkpointing(),
        false => device,
    };
    let mut machine = Machine::new(device, program.kind);
    for _ in 0..program.iterations {
        let inputs = program.inputs.iter().enumerate();
        for (phase, (dims, tracked)) in inputs {
            let data = machine.wave(phase + 5, dims);
            let data = match tracked {
                true => each!(data, |x| x.require_grad()),
                false => data,
            };
            machine.pool.push(data);
        }
        machine.run_in(program.within, &program.steps);
        machine.backward(program.loss);
        machine.update(program.update);
    }
    machine.clear();
    for parameter in core::mem::take(&mut machine.parameters) {
        machine.see("a parameter", parameter.value);
    }
    machine.seen
}

impl Machine {
    /// A backward pass from the latest tensors. Adds up gradients, and drops all tensors.
    pub(super) fn backward(&mut self, loss: Loss) {
        let tracked = self.pool.iter().rev().filter(|it| it.is_tracked()).cloned();
        let latest = tracked.take(if matches!(loss, Loss::Last) { 1 } else { 3 });
        let terms: Vec<Tensor<1>> = latest.map(|it| self.loss_of(it, loss)).collect();
        let sum = terms.into_iter().reduce(|sum, term| sum + term);
        let inputs = self.pool.clone();
        self.clear();
        let Some(sum) = sum else {
            return;
        };
        let gradients = sum.backward();
        self.see("a loss", sum.into());
        for input in inputs {
            let gradient = ask!(&input, |x| x.grad(&gradients).map(Float::from));
            if let Some(gradient) = gradient {
                self.see("a gradient of data", gradient);
            }
        }
        for parameter in &mut self.parameters {
            let gradient = ask!(&parameter.value, |x| x.grad(&gradients).map(Float::from));
            let Some(gradient) = gradient else {
                continue;
            };
            parameter.gradient = Some(match parameter.gradient.take() {
                Some(sum) => both!(sum, gradient, |a, b| a + b),
                None => gradient,
            });
        }
    }

    fn loss_of(&self, x: Float, loss: Loss) -> Tensor<1> {
        let elements = x.elements();
        match loss {
            Loss::Last if elements == 1 => x.into_rank([1]),
            Loss::Sum | Loss::Last => ask!(x, |x| x.sum()),
            Loss::Mean => ask!(x, |x| x.mean()),
            Loss::Squares => ask!(x, |x| x.powi_scalar(2).mean()),
            Loss::Weighted => {
                let weights = self.wave(0, &x.dims());
                ask!(both!(x, weights, |x, y| x * y), |x| x.sum())
            }
        }
    }

    /// Updates the parameters by their gradients.
    fn update(&mut self, update: Update) {
        let rate = match self.kind {
            Kind::Exact => 1.0,
            Kind::Rounded => 0.1,
        };
        let mut seen = Vec::new();
        for parameter in &mut self.parameters {
            let Some(gradient) = parameter.gradient.take() else {
                continue;
            };
            seen.push(gradient.clone());
            let value = parameter.value.clone().inner();
            let state = core::mem::take(&mut parameter.state);
            let step = match update {
                Update::None => continue,
                Update::Sgd => gradient,
                Update::Momentum => {
                    let sum = match state.into_iter().next() {
                        Some(sum) => both!(sum, gradient, |v, g| v * 0.5 + g),
                        None => gradient,
                    };
                    parameter.state.push(sum.clone());
                    sum
                }
                Update::WeightDecay => both!(gradient, value.clone(), |g, p| g + p * 0.5),
                Update::Adam => {
                    let mut state = state.into_iter();
                    let zeros = || each!(gradient.clone(), |g| g.zeros_like());
                    let first = state.next().unwrap_or_else(zeros);
                    let second = state.next().unwrap_or_else(zeros);
                    let first = both!(first, gradient.clone(), |m, g| m * 0.9 + g * 0.1);
                    let second = both!(second, gradient.clone(), |v, g| v * 0.99
                        + g.clone() * g * 0.01);
                    parameter.state.extend([first.clone(), second.clone()]);
                    both!(first, second, |m, v| m / (v.sqrt() + 1e-8))
                }
            };
            let value = both!(value, step, |p, g| (p - g * rate).clamp(-2.0, 2.0));
            let old = parameter.value.clone();
            parameter.value = both!(value, old, |x, old| rejoin(x, &old).require_grad());
        }
        for gradient in seen {
            mark(&gradient);
            self.see("a gradient", gradient);
        }
        for parameter in &self.parameters {
            mark(&parameter.value);
        }
    }
}

/// The op that tells which dtype parameters and gradients are stored in. Nothing else in programs is this op.
pub(super) const MARK: Op = Op::float_ceil;

/// Runs the op on the tensor.
fn mark(x: &Float) {
    ask!(x.clone(), |x| drop(x.ceil()));
}
