//! [`Machine`]: what a program runs on: its tensors and parameters.

use super::{
    ops::Kind,
    picks::Picks,
    program::{Region, Step},
    value::{Float, ask, broadcast, each},
};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, Transaction};
use burn_amp::{Policy, autocast, full_precision, named};

/// Results with more elements are dropped.
pub(super) const LARGEST: usize = 1 << 14;

/// The tensors of a program that runs.
pub(super) struct Machine {
    device: Device,
    pub(super) kind: Kind,
    /// The tensors that steps take their operands from, the latest last.
    pub(super) pool: Vec<Float>,
    held: Vec<Float>,
    pub(super) parameters: Vec<Parameter>,
    /// Whether steps run on tensors without autodiff.
    inference: bool,
    /// The dtype that steps run in.
    dtype: FloatDType,
    pub(super) seen: Seen,
}

/// What a program sees.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Seen {
    /// The dtypes and shapes of results.
    pub(super) forms: Vec<(&'static str, DType, Vec<usize>)>,
    /// What was read.
    pub(super) data: Vec<(String, TensorData)>,
}

/// A tensor that a program trains.
pub(super) struct Parameter {
    slot: usize,
    dims: Vec<usize>,
    pub(super) value: Float,
    /// The sum of the gradients of this iteration.
    pub(super) gradient: Option<Float>,
    /// What an optimizer keeps.
    pub(super) state: Vec<Float>,
}

impl Machine {
    pub(super) fn new(device: Device, kind: Kind) -> Self {
        Self {
            device,
            kind,
            pool: Vec::new(),
            held: Vec::new(),
            parameters: Vec::new(),
            inference: false,
            dtype: FloatDType::F32,
            seen: Seen::default(),
        }
    }

    /// The device of the tensors that steps run on.
    pub(super) fn device(&self) -> Device {
        match self.inference {
            true => self.device.clone().inner(),
            false => self.device.clone(),
        }
    }

    /// Runs steps one after the other.
    pub(super) fn run(&mut self, steps: &[Step]) {
        let mut steps = steps;
        while let Some((step, rest)) = steps.split_first() {
            let inside = match step {
                Step::Region(_, inside)
                | Step::Thread(inside)
                | Step::Inference(inside)
                | Step::InDtype(_, inside) => *inside,
                _ => 0,
            };
            let (inside, rest) = rest.split_at(inside.min(rest.len()));
            self.step(step, inside);
            steps = rest;
        }
    }

    /// Runs steps in a region.
    pub(super) fn run_in(&mut self, region: Region, steps: &[Step]) {
        match region {
            Region::Full => full_precision(|| self.run(steps)),
            Region::O0 => autocast(&Policy::o0(), || self.run(steps)),
            Region::Bf16 => autocast(&Policy::bf16(), || self.run(steps)),
            Region::Fp16 => autocast(&Policy::fp16(), || self.run(steps)),
            Region::Named => named("part", || self.run(steps)),
        }
    }

    fn step(&mut self, step: &Step, inside: &[Step]) {
        match step {
            Step::Op(op, picks) => {
                let result = (op.run)(self, &mut Picks::new(picks));
                let dtype = self.dtype;
                let result = result.map(|it| each!(it, |x| x.cast(dtype)));
                if let Some(result) = result.filter(|it| it.elements() <= LARGEST) {
                    self.seen
                        .forms
                        .push((op.name, result.dtype(), result.dims()));
                    self.pool.push(result);
                }
            }
            Step::Region(region, _) => self.run_in(*region, inside),
            Step::Thread(_) => std::thread::scope(|scope| {
                let thread = scope.spawn(|| self.run(inside));
                if let Err(panic) = thread.join() {
                    std::panic::resume_unwind(panic);
                }
            }),
            Step::Inference(_) => self.infer(inside),
            Step::InDtype(dtype, _) => self.in_dtype(*dtype, inside),
            Step::ReadAll => {
                let transaction = self
                    .pool
                    .iter()
                    .cloned()
                    .fold(Transaction::default(), |transaction, it| {
                        ask!(it, |x| transaction.register(x))
                    });
                let read = transaction.execute().into_iter();
                self.seen
                    .data
                    .extend(read.map(|it| ("one of all".to_string(), it)));
            }
            Step::Read(which) => {
                if let Some(tensor) = self.among_latest(*which as usize) {
                    let tensor = self.pool[tensor].clone();
                    self.see("a result", tensor);
                }
            }
            Step::Drop(which) => {
                if let Some(tensor) = self.among_latest(*which as usize) {
                    self.pool.remove(tensor);
                }
            }
            Step::Hold(which) => {
                let tensor = self.among_latest(*which as usize);
                self.held.extend(tensor.map(|it| self.pool[it].clone()));
            }
            Step::Backward(loss) => {
                if !self.inference {
                    self.backward(*loss);
                }
            }
            Step::Sync => self.device.sync().expect("the device answers"),
        }
    }

    fn infer(&mut self, steps: &[Step]) {
        if self.inference {
            return self.run(steps);
        }
        let inner: Vec<Float> = self.pool.iter().cloned().map(Float::inner).collect();
        let outer = core::mem::replace(&mut self.pool, inner);
        self.inference = true;
        self.run(steps);
        self.inference = false;
        let inner = core::mem::replace(&mut self.pool, outer);
        if let Some(last) = inner.into_iter().next_back() {
            self.see("an inference", last);
        }
    }

    fn in_dtype(&mut self, dtype: FloatDType, steps: &[Step]) {
        let before = core::mem::replace(&mut self.dtype, dtype);
        self.cast_all();
        self.run(steps);
        self.dtype = before;
        self.cast_all();
    }

    /// Casts all tensors to the dtype that steps run in.
    fn cast_all(&mut self) {
        let dtype = self.dtype;
        for tensor in &mut self.pool {
            *tensor = each!(tensor.clone(), |x| x.cast(dtype));
        }
    }

    pub(super) fn see(&mut self, what: impl Into<String>, tensor: Float) {
        self.seen.data.push((what.into(), tensor.read()));
    }

    /// Drops all tensors but parameters.
    pub(super) fn clear(&mut self) {
        self.pool.clear();
        self.held.clear();
    }

    /// The place of one of the latest tensors.
    fn among_latest(&self, pick: usize) -> Option<usize> {
        let latest = self.pool.len().min(6);
        let back = pick.checked_rem(latest)?;
        Some(self.pool.len() - 1 - back)
    }

    /// An operand: one of the latest tensors, which is used up or not.
    pub(super) fn float(&mut self, picks: &mut Picks<'_>) -> Float {
        let pick = picks.next();
        let Some(place) = self.among_latest(pick / 2) else {
            return self.parameter(0, &[2, 3]);
        };
        match pick % 2 == 1 && self.pool.len() > 2 {
            true => self.pool.remove(place),
            false => self.pool[place].clone(),
        }
    }

    /// An operand of that rank.
    pub(super) fn of_rank(&mut self, rank: usize, picks: &mut Picks<'_>) -> Float {
        let x = self.float(picks);
        to_rank(x, rank)
    }

    /// An operand of that rank at least.
    pub(super) fn of_rank_from(&mut self, least: usize, picks: &mut Picks<'_>) -> Float {
        let x = self.float(picks);
        let rank = x.rank().max(least);
        to_rank(x, rank)
    }

    /// A second operand, with which `x` can be added.
    pub(super) fn like(&mut self, x: &Float, picks: &mut Picks<'_>) -> Float {
        let dims = x.dims();
        let fits = |y: &&Float| {
            let broadcast = broadcast(&dims, &y.dims());
            broadcast.is_some_and(|dims| dims.iter().product::<usize>() <= LARGEST)
        };
        let fitting: Vec<&Float> = self.pool.iter().rev().filter(fits).collect();
        match picks.below(4) {
            0 | 1 if !fitting.is_empty() => fitting[picks.below(fitting.len())].clone(),
            2 => x.clone(),
            _ => {
                let ones = picks.next();
                let dims = dims.iter().enumerate();
                let dims: Vec<usize> = dims
                    .map(|(dim, &size)| if ones >> dim & 1 == 1 { 1 } else { size })
                    .collect();
                self.parameter(picks.below(2), &dims)
            }
        }
    }

    /// A vector as a parameter, for each of some channels.
    pub(super) fn vector(&mut self, slot: usize, size: usize) -> Tensor<1> {
        self.parameter(slot, &[size]).into_rank([size])
    }

    /// The parameter of that shape in that slot. It is made when it is first asked for.
    pub(super) fn parameter(&mut self, slot: usize, dims: &[usize]) -> Float {
        let is_it = |it: &&Parameter| it.slot == slot && it.dims == dims;
        let value = match self.parameters.iter().find(is_it) {
            Some(parameter) => parameter.value.clone(),
            None => {
                let value = self.tracked_wave(slot + 1, dims);
                let value = each!(value, |x| x.require_grad());
                self.parameters.push(Parameter {
                    slot,
                    dims: dims.to_vec(),
                    value: value.clone(),
                    gradient: None,
                    state: Vec::new(),
                });
                value
            }
        };
        self.fit(value)
    }

    /// Data that looks random, and is the same each time.
    pub(super) fn wave(&self, phase: usize, dims: &[usize]) -> Float {
        self.fit(self.tracked_wave(phase, dims))
    }

    /// The tensor as the steps take it.
    pub(super) fn fit(&self, x: Float) -> Float {
        let x = match self.inference && x.is_autodiff() {
            true => x.inner(),
            false => x,
        };
        match self.dtype {
            FloatDType::F32 => x,
            dtype => each!(x, |x| x.cast(dtype)),
        }
    }

    fn tracked_wave(&self, phase: usize, dims: &[usize]) -> Float {
        const SMALL: [f32; 8] = [0.0, 1.0, -1.0, 0.0, 2.0, 1.0, -1.0, 0.0];
        let number = |place: usize| match self.kind {
            Kind::Exact => SMALL[(place * 5 + place / 7 + phase * 3) % SMALL.len()],
            Kind::Rounded => (place as f32 * 0.77 + phase as f32).sin() * 0.9,
        };
        let numbers: Vec<f32> = (0..dims.iter().product()).map(number).collect();
        Float::from_data(TensorData::new(numbers, dims), &self.device)
    }

    /// A number that programs compute with.
    pub(super) fn number(&self, picks: &mut Picks<'_>) -> f64 {
        const EXACT: [f64; 5] = [1.0, -1.0, 2.0, 0.5, 0.0];
        const ROUNDED: [f64; 10] = [0.5, 1.0, -1.0, 2.0, 0.0, 0.1, -3.3, 1e-8, 0.999_999_9, -1e9];
        match self.kind {
            Kind::Exact => EXACT[picks.below(EXACT.len())],
            Kind::Rounded => ROUNDED[picks.below(ROUNDED.len())],
        }
    }
}

/// The tensor in a shape of that rank.
fn to_rank(x: Float, rank: usize) -> Float {
    let mut dims = x.dims();
    if dims.len() == rank {
        return x;
    }
    while dims.len() > rank {
        let first = dims.remove(0);
        dims[0] *= first;
    }
    while dims.len() < rank {
        dims.insert(0, 1);
    }
    x.in_shape(&dims)
}
