//! Logs a run while it trains.

use std::ops::Range;
use std::time::Instant;

use examples::metrics::{Metrics, MetricsError, Row};
use examples::progress::{Progress, StepStatus};

use crate::cli::Args;
use crate::evaluate::HeldOut;

/// The progress and the metrics of a run. Only rank 0 has them.
pub(crate) struct Log {
    metrics: Metrics,
    progress: Progress,
    epochs: usize,
    started: Instant,
    /// The seconds that a resumed run had taken before.
    before: f64,
    /// The losses of the epoch so far.
    losses: Vec<f64>,
}

/// One step, for the log.
pub(crate) struct Step {
    /// The number of steps done.
    pub(crate) done: usize,
    /// The epoch, counted from 1.
    pub(crate) epoch: usize,
    pub(crate) lr: f64,
    pub(crate) loss: f64,
    pub(crate) images_per_second: f64,
    /// Measured at the end of an epoch.
    pub(crate) held_out: Option<HeldOut>,
}

impl Log {
    /// The log of these steps.
    pub(crate) fn new(
        args: &Args,
        Range {
            start: first,
            end: last,
        }: Range<usize>,
        per_epoch: usize,
    ) -> Result<Self, MetricsError> {
        let metrics = Metrics::create(&args.out.join("metrics.csv"), first)?;
        let rows = metrics.rows();
        let done = first % per_epoch;
        let open = &rows[rows.len().saturating_sub(done)..];
        let losses = open.iter().map(|row| row.loss).collect();
        Ok(Self {
            before: rows.last().map_or(0.0, |row| row.seconds),
            metrics,
            progress: if args.quiet {
                Progress::quiet()
            } else {
                Progress::new(last, first)
            },
            epochs: args.epochs,
            started: Instant::now(),
            losses,
        })
    }

    /// Shows and writes a step, and prints a line at the end of an epoch.
    pub(crate) fn step(&mut self, step: Step) -> Result<(), MetricsError> {
        let Step {
            done,
            epoch,
            lr,
            loss,
            images_per_second,
            held_out,
        } = step;
        self.progress.step(StepStatus {
            step: done,
            loss,
            lr,
            images_per_second,
        });
        self.losses.push(loss);
        if let Some(held_out) = &held_out {
            let losses = std::mem::take(&mut self.losses);
            let mean = losses.iter().sum::<f64>() / losses.len() as f64;
            self.progress.line(&format!(
                "epoch {epoch:>3} of {}  loss {mean:.4}  held out: loss {:.4}, accuracy {:.2} %",
                self.epochs,
                held_out.loss,
                100.0 * held_out.accuracy()
            ));
        }
        self.metrics.push(Row {
            step: done,
            epoch,
            lr,
            loss,
            images_per_second,
            seconds: self.before + self.started.elapsed().as_secs_f64(),
            held_out_loss: held_out.map(|held_out| held_out.loss),
            held_out_accuracy: held_out.map(|held_out| held_out.accuracy()),
        })
    }

    /// Removes the progress bar, and returns the metrics.
    pub(crate) fn finish(self) -> Metrics {
        self.progress.finish();
        self.metrics
    }
}
