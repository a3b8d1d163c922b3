//! The process that starts others to measure.

use std::{
    io,
    process::Command,
    time::{Duration, Instant},
};

use super::{Event, Findings, Job};
use crate::{Precision, lines_of};

/// The ways to train a model that should be measured.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The model's name in [`model_training`](crate::models::model_training).
    pub model: String,
    /// The number of images or texts in a batch.
    pub batch: usize,
    /// The ways, of which the most important are the first. Each is measured even if others fail.
    pub ways: Vec<Precision>,
    /// The number of rounds in which ways are timed in turn.
    pub rounds: usize,
}

impl Bench {
    /// Measures the ways in processes that `command` starts, which [do](super::measure) the job that they
    /// [get](Job::of_this_process): to measure the ways that are left. The last process is killed after `limit`; no round begins
    /// after 80 % of it. Ways that there is no time for are left out.
    ///
    /// # Errors
    /// If a process cannot be started, or ends before it begins with a way. Earlier results are in the findings.
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
                let left = self.left_of(findings);
                let alone = left.map(|job| job.alone).unwrap_or_default();
                findings.hear(Event::LeftOut(alone));
                return Ok(());
            }
        }
        Ok(())
    }

    /// The job with everything that is still to be measured.
    fn left_of(&self, findings: &Findings) -> Option<Job> {
        let mut alive = self.ways.clone();
        alive.retain(|way| !findings.has_failed(*way) && !findings.left_out.contains(way));
        let (in_turn, alone): (Vec<_>, Vec<_>) = alive
            .into_iter()
            .partition(|way| findings.alone(*way).is_some());
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

#[cfg(test)]
mod tests {
    use super::*;
    use Precision::{Bf16, O0, Plain};

    #[test]
    fn what_is_left_out_stays_so() {
        let bench = Bench {
            model: "gpt2".into(),
            batch: 1,
            ways: vec![Plain, Bf16, O0],
            rounds: 10,
        };
        let mut findings = Findings::default();
        for way in [Plain, Bf16] {
            findings.hear(Event::Alone {
                way,
                seconds: vec![1.0; 3],
                bytes: 0,
                polls: 1.0,
            });
        }
        let asked = |findings: &Findings| {
            let job = bench.left_of(findings).unwrap();
            (job.alone, job.in_turn)
        };
        assert_eq!(asked(&findings), (vec![O0], vec![Plain, Bf16]));
        findings.hear(Event::LeftOut(vec![O0]));
        assert_eq!(asked(&findings), (vec![], vec![Plain, Bf16]));
    }
}
