//! Shows the progress of a run: a live bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// How often a plain line with the progress is printed.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// What is shown about a step.
#[derive(Debug, Clone, Copy)]
pub struct StepStatus {
    /// The number of steps done.
    pub step: usize,
    /// The mean training loss over all ranks.
    pub loss: f64,
    /// The learning rate.
    pub lr: f64,
    /// Training images per second over all ranks.
    pub images_per_second: f64,
}

/// Shows the progress of a run by a live bar on standard error, and prints lines on standard output.
///
/// ```
/// use examples::progress::{Progress, StepStatus};
///
/// let mut progress = Progress::new(100, 0);
/// progress.step(StepStatus { step: 1, loss: 2.3, lr: 0.1, images_per_second: 500.0 });
/// progress.line("epoch 1 of 1");
/// progress.finish();
/// ```
#[derive(Debug)]
pub struct Progress {
    output: Output,
    total: usize,
    started: Instant,
    first: usize,
}

#[derive(Debug)]
enum Output {
    Bar(ProgressBar),
    Plain { shown: Instant },
    Quiet,
}

impl Progress {
    /// Progress over `total` steps, of which `done` are already done: a bar if standard error is a terminal, otherwise a plain
    /// line now and then.
    pub fn new(total: usize, done: usize) -> Self {
        let output = if std::io::stderr().is_terminal() {
            let style = "{bar:20.cyan/blue} {pos}/{len} steps  {msg}  {eta} left";
            let bar = ProgressBar::new(total as u64).with_position(done as u64);
            bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
            bar.reset_eta();
            Output::Bar(bar)
        } else {
            Output::Plain {
                shown: Instant::now(),
            }
        };
        Self {
            output,
            total,
            started: Instant::now(),
            first: done,
        }
    }

    /// Progress that shows nothing at all.
    pub fn quiet() -> Self {
        Self {
            output: Output::Quiet,
            total: 0,
            started: Instant::now(),
            first: 0,
        }
    }

    /// Shows a step.
    pub fn step(&mut self, status: StepStatus) {
        match &mut self.output {
            Output::Bar(bar) => {
                bar.set_message(describe(&status));
                bar.set_position(status.step as u64);
            }
            Output::Plain { shown } if shown.elapsed() >= PLAIN_INTERVAL => {
                *shown = Instant::now();
                let left = time_left(
                    self.started.elapsed(),
                    status.step - self.first,
                    self.total - status.step,
                );
                let seconds = left.as_secs();
                eprintln!(
                    "step {} of {}  {}  {seconds} s left",
                    status.step,
                    self.total,
                    describe(&status)
                );
            }
            Output::Plain { .. } | Output::Quiet => {}
        }
    }

    /// Prints a line on standard output, above the bar.
    pub fn line(&self, text: &str) {
        match &self.output {
            Output::Bar(bar) => bar.suspend(|| println!("{text}")),
            Output::Plain { .. } => println!("{text}"),
            Output::Quiet => {}
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Output::Bar(bar) = &self.output {
            bar.finish_and_clear();
        }
    }
}

fn describe(status: &StepStatus) -> String {
    let StepStatus {
        loss,
        lr,
        images_per_second,
        ..
    } = status;
    format!("loss {loss:.4}  lr {lr:.4}  {images_per_second:.0} images/s")
}

/// The time that `left` steps take if `done` steps took `elapsed`, at most [`Duration::MAX`].
fn time_left(elapsed: Duration, done: usize, left: usize) -> Duration {
    let seconds = elapsed.as_secs_f64() * left as f64 / done.max(1) as f64;
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_reads_well() {
        let status = StepStatus {
            step: 3,
            loss: 0.123456,
            lr: 0.1,
            images_per_second: 512.6,
        };
        assert_eq!(describe(&status), "loss 0.1235  lr 0.1000  513 images/s");
    }

    #[test]
    fn time_left_is_in_proportion() {
        assert_eq!(
            time_left(Duration::from_secs(10), 5, 20),
            Duration::from_secs(40)
        );
        assert_eq!(
            time_left(Duration::from_secs(1), 0, 3),
            Duration::from_secs(3)
        );
        assert_eq!(
            time_left(Duration::from_secs(10), 1, usize::MAX),
            Duration::MAX
        );
    }
}
