//! The questions, each of which is answered by a process of its own: a kernel that fails may leave the GPU unusable for its process,
//! and one that hangs is ended with it.

use benches::{BENCH_SECONDS, lines_of, problem_of};
use burn::tensor::Device;
use burn_fp8::kernels::MatmulRoutine;
use serde::{Deserialize, Serialize};
use std::{
    env,
    fmt::{self, Display},
    process::Command,
    time::Duration,
};

use super::{
    casts, layers,
    products::{self, Torch},
};

/// A question. Arguments choose it by its name.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Question {
    /// What does quantizing a tensor of this shape cost?
    Quantize([usize; 2]),
    /// Does the GPU still work after a product of this size by this routine?
    Routine(MatmulRoutine, [usize; 3]),
    /// What does a product of this size cost?
    Product([usize; 3]),
    /// What does a training step of a layer cost?
    Linear([usize; 3]),
}

/// What was found before.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Known {
    /// PyTorch's products.
    pub(crate) torch: Vec<Torch>,
    /// The routines whose first product failed or took too long.
    pub(crate) broken: Vec<MatmulRoutine>,
}

impl Question {
    /// The environment variable that passes a question to a process, with what is known.
    const VARIABLE: &'static str = "GPU_FP8_QUESTION";

    /// This process's question, if it was started for one, and what is known.
    pub(crate) fn of_this_process() -> Option<(Self, Known)> {
        let question = env::var(Self::VARIABLE).ok()?;
        Some(serde_json::from_str(&question).expect("a question in JSON"))
    }

    /// Starts a process that answers the question, prints what it prints, and returns whether it succeeded. The process is killed
    /// after `limit`; no round begins after 80 % of it.
    pub(crate) fn ask(&self, known: &Known, limit: Option<Duration>) -> bool {
        let own = env::current_exe().expect("the program is a file");
        let question = serde_json::to_string(&(self, known)).expect("it is data");
        let mut command = Command::new(own);
        command.env(Self::VARIABLE, question);
        if let Some(limit) = limit {
            command.env(BENCH_SECONDS, (0.8 * limit.as_secs_f64()).to_string());
        }
        let problem = problem_of(lines_of(&mut command, limit, |line| println!("{line}")));
        if let Some(why) = &problem {
            println!("- {self}: {why}\n");
        }
        problem.is_none()
    }

    /// Answers the question in this process.
    pub(crate) fn answer(self, known: &Known, device: &Device) {
        match self {
            Self::Quantize(shape) => casts::compare(shape, device),
            Self::Routine(routine, size) => products::compute_one(routine, size, device),
            Self::Product(size) => products::compare(size, known, device),
            Self::Linear(shape) => layers::compare(shape, device),
        }
    }
}

impl Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quantize(shape) => write!(f, "quantize {shape:?}"),
            Self::Routine(routine, [m, k, n]) => write!(f, "{routine} {m}x{k}x{n}"),
            Self::Product([m, k, n]) => write!(f, "product {m}x{k}x{n}"),
            Self::Linear([rows, from, to]) => write!(f, "linear {rows}x{from}x{to}"),
        }
    }
}
