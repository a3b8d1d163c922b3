//! The job that the measuring process gets, and the events that it reports, as lines of JSON.

use std::env;

use serde::{Deserialize, Serialize};

use crate::Precision;

/// What a process should measure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The model's name in [`model_training`](crate::models::model_training).
    pub model: String,
    /// The number of images or texts in a batch.
    pub batch: usize,
    /// The ways to measure by themselves first, while there is time: does the way train, and in how much memory?
    pub alone: Vec<Precision>,
    /// The ways to time in turn with those of `alone`. They were measured by themselves before.
    pub in_turn: Vec<Precision>,
    /// The number of rounds in which ways are timed in turn.
    pub rounds: usize,
    /// The seconds after the start of the job from which on no further round begins. The first always runs.
    pub seconds: f64,
}

impl Job {
    /// The environment variable that passes a job.
    pub const VARIABLE: &'static str = "GPU_STEPS_JOB";

    /// This process's job, if it was started for one.
    ///
    /// ```
    /// assert_eq!(benches::steps::Job::of_this_process(), None);
    /// ```
    pub fn of_this_process() -> Option<Self> {
        let job = env::var(Self::VARIABLE).ok()?;
        Some(serde_json::from_str(&job).expect("a job in JSON"))
    }
}

/// What a process reports while it measures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// The process begins to work on this way. If the process ends, this way is to blame.
    Begins(Precision),
    /// The result of a way by itself.
    Alone {
        /// The way.
        way: Precision,
        /// The seconds that each step took.
        seconds: Vec<f64>,
        /// The peak memory in bytes; 0 if the device does not report it.
        bytes: u64,
        /// How often the device was polled in a step.
        polls: f64,
    },
    /// Ways that are not measured, because there is no time for them.
    LeftOut(Vec<Precision>),
    /// The seconds that a step of each way took in one round.
    Round(Vec<(Precision, f64)>),
    /// A way does not train. The process ends.
    Failed {
        /// The way.
        way: Precision,
        /// The reason.
        why: String,
    },
}

impl Event {
    /// Parses a line. `None` for other lines, which programs print too.
    pub(super) fn read(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}
