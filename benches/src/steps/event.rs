//! What the process that measures is told, and what it tells, as lines of JSON.

use std::env;

use serde::{Deserialize, Serialize};

use crate::Precision;

/// What a process is to measure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// As [`model_training`](crate::models::model_training) calls it.
    pub model: String,
    /// Of that many images or texts.
    pub batch: usize,
    /// Ways that are to be measured by themselves first: does one train, and in how much memory?
    pub alone: Vec<Precision>,
    /// Ways that are to be timed in turn with those, and were measured by themselves before.
    pub in_turn: Vec<Precision>,
    /// How many rounds of that.
    pub rounds: usize,
    /// No round begins so many seconds after the job, but for the first.
    pub seconds: f64,
}

impl Job {
    /// The variable that a job is handed over in.
    pub const VARIABLE: &'static str = "GPU_STEPS_JOB";

    /// The job of this process, if it was started for one.
    ///
    /// ```
    /// assert_eq!(benches::steps::Job::of_this_process(), None);
    /// ```
    pub fn of_this_process() -> Option<Self> {
        let job = env::var(Self::VARIABLE).ok()?;
        Some(serde_json::from_str(&job).expect("a job in JSON"))
    }
}

/// What a process tells while it measures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// What comes next is of this way: if the process ends, it is to blame.
    Begins(Precision),
    /// A way, by itself.
    Alone {
        /// Which.
        way: Precision,
        /// What each step took.
        seconds: Vec<f64>,
        /// In use at most; 0 where the device does not say.
        bytes: u64,
        /// How often the device was asked in a step.
        polls: f64,
    },
    /// What a step of each way took in one round.
    Round(Vec<(Precision, f64)>),
    /// A way that trains nothing; the process ends.
    Failed {
        /// Which.
        way: Precision,
        /// Why.
        why: String,
    },
}

impl Event {
    /// What a line tells. Programs print other lines too.
    pub(super) fn read(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}
