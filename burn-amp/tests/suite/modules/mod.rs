//! Every module and every loss of burn-nn under autocast, beside plain f32.
//!
//! The same weights and the same inputs run forward and backward on plain Flex (or, where a case says so,
//! on the plain device) and on autocast devices. What a module takes comes out of a matrix product, so that it is stored low.

mod activations;
mod coverage;
mod feed;
mod layers;
mod losses;
mod norms;
mod random;
mod run;
mod sequences;
mod spatial;

use super::devices::cuda;
use burn::{
    module::Module,
    tensor::{Device, Tensor},
};
use burn_amp::Autocast;
use feed::Feed;
use run::{Run, Start};
use std::sync::LazyLock;

/// How far output, gradients of parameters and gradients of inputs may be from those of f32, as a
/// share of the tensor's norm: 8 roundings' worth. A rounding is off by 2^-9 at most in bf16 and by
/// 2^-12 in fp16.
const BF16_TOLERANCE: f32 = 8.0 / 512.0;
const FP16_TOLERANCE: f32 = 8.0 / 4096.0;

/// What autocast is put over: an NVIDIA GPU where there is one, else Flex.
fn base() -> Device {
    cuda().unwrap_or_else(Device::flex)
}

static BF16: LazyLock<Device> = LazyLock::new(|| Autocast::bf16().device(base()).unwrap());
static FP16: LazyLock<Device> = LazyLock::new(|| Autocast::fp16().device(base()).unwrap());

/// A module of burn-nn and how to run it.
pub(super) struct Case {
    /// The name of its type.
    module: &'static str,
    /// By how much its tolerance is larger.
    factor: f32,
    vanishing: &'static [&'static str],
    beside_base: bool,
    run: Box<dyn Fn(&Start) -> Run>,
}

/// The module that `init` makes, run by `forward`.
fn case<M: Module + 'static, const D: usize>(
    init: impl Fn(&Device) -> M + 'static,
    forward: impl Fn(&M, &Feed) -> Tensor<D> + 'static,
) -> Case {
    let path = core::any::type_name::<M>();
    Case {
        module: path.rsplit("::").next().unwrap_or(path),
        factor: 1.0,
        vanishing: &[],
        beside_base: false,
        run: Box::new(move |start| Run::new(start, &init, &forward)),
    }
}

impl Case {
    /// These parameters have a gradient of zero in exact arithmetic, so that what is left is
    /// rounding, in f32 as well. It is compared with the largest gradient.
    fn vanishing(self, vanishing: &'static [&'static str]) -> Self {
        Self { vanishing, ..self }
    }

    /// Each attention may be as far again: the gradient of a softmax is a difference of numbers that are
    /// nearly equal.
    fn attends(self, times: u8) -> Self {
        Self {
            factor: 1.0 + f32::from(times),
            ..self
        }
    }

    /// Recurrent layers may be twice as far: each step rounds gates and states that are made of those of the one before.
    fn recurs(self) -> Self {
        Self {
            factor: 2.0,
            ..self
        }
    }

    /// The plain device is the one that autocast is put over, not Flex: Burn's own results on a GPU are others, as are random
    /// numbers of the same seed.
    fn beside_base(self) -> Self {
        Self {
            beside_base: true,
            ..self
        }
    }

    /// What is farther from f32 than it may be.
    fn problems(&self) -> Vec<String> {
        let plain = match self.beside_base {
            true => base(),
            false => Device::flex(),
        };
        let exact = (self.run)(&Start::Plain(plain));
        let runs = [
            ("bf16", Start::Forked(BF16.clone()), BF16_TOLERANCE),
            ("fp16", Start::Loaded(FP16.clone()), FP16_TOLERANCE),
        ];
        let problems = runs.iter().flat_map(|(name, start, tolerance)| {
            let low = (self.run)(start);
            let tolerance = tolerance * self.factor;
            let distances = low.distances(&exact, self.vanishing).into_iter();
            let far = distances.filter(move |(_, off)| off.is_nan() || *off >= tolerance);
            far.map(move |(what, off)| {
                format!("{} in {name}: {what} is {off:.2e} off", self.module)
            })
        });
        problems.collect()
    }
}

/// Every case is as near to f32 as its dtype allows.
fn check(cases: Vec<Case>) {
    let problems: Vec<_> = cases.iter().flat_map(Case::problems).collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}
