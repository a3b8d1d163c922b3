//! The process that has others measure.

use std::{
    io,
    process::Command,
    time::{Duration, Instant},
};

use super::{Event, Findings, Job};
use crate::{Precision, lines_of};

/// Ways to train a model that are to be measured.
#[derive(Clone, Debug)]
pub struct Bench {
    /// As [`model_training`](crate::models::model_training) calls it.
    pub model: String,
    /// Of that many images or texts.
    pub batch: usize,
    /// The ways; each has a chance, whatever becomes of the others.
    pub ways: Vec<Precision>,
    /// How often they are timed in turn.
    pub rounds: usize,
}

impl Bench {
    /// Has them measured by processes that `command` starts, which [do the job](super::measure) that [is theirs](Job::of_this_process),
    /// each the ways that are left. By this time the last is ended; rounds end somewhat before.
    ///
    /// # Errors
    /// Where a process cannot be started, or ends without having begun with a way. What was found before is in the findings.
    pub fn run(
        &self,
        findings: &mut Findings,
        command: impl Fn() -> Command,
        limit: Option<Duration>,
    ) -> io::Result<()> {
        let start = Instant::now();
        while let Some(mut job) = self.left_of(findings) {
            let left = limit.map(|limit| limit.saturating_sub(start.elapsed()));
            job.seconds = left.map_or(f64::MAX, |left| 0.8 * left.as_secs_f64());
            let mut command = command();
            command.env(Job::VARIABLE, serde_json::to_string(&job)?);
            let (mut current, failed) = (None, findings.failed.len());
            let end = lines_of(&mut command, left, |line| match Event::read(line) {
                Some(Event::Begins(way)) => current = Some(way),
                Some(event) => findings.hear(event),
                None => {}
            })?;
            let why = match end {
                None => "the time was up".into(),
                Some(end) if end.success() && findings.failed.len() == failed => return Ok(()),
                Some(end) => format!("its process ended: {end}"),
            };
            if findings.failed.len() == failed {
                let way = current.ok_or_else(|| io::Error::other(why.clone()))?;
                findings.hear(Event::Failed { way, why });
            }
            if end.is_none() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// What is still to be measured.
    fn left_of(&self, findings: &Findings) -> Option<Job> {
        let alive = self.ways.iter().filter(|way| !findings.has_failed(**way));
        let (in_turn, alone): (Vec<_>, Vec<_>) =
            alive.partition(|way| findings.alone(**way).is_some());
        let rounds = self.rounds.saturating_sub(findings.rounds.len());
        let more = rounds > 0 && in_turn.len() > 1;
        (more || !alone.is_empty()).then(|| Job {
            model: self.model.clone(),
            batch: self.batch,
            alone,
            in_turn,
            rounds,
            seconds: f64::MAX,
        })
    }
}
