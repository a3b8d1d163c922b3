//! The table that is printed at the end.

use std::fmt;

use crate::cli::Precision;
use crate::train::Outcome;

/// The outcomes of every precision, seed by seed.
pub(crate) struct Report {
    seeds: usize,
    rows: Vec<(Precision, Vec<Outcome>)>,
}

impl Report {
    pub(crate) fn new(seeds: usize) -> Self {
        Self {
            seeds,
            rows: Vec::new(),
        }
    }

    /// The number of trainings so far.
    pub(crate) fn len(&self) -> usize {
        self.rows.iter().map(|(_, outcomes)| outcomes.len()).sum()
    }

    /// Adds the outcome of a precision's next seed.
    pub(crate) fn add(&mut self, precision: Precision, outcome: Outcome) {
        match self.rows.last_mut() {
            Some((last, outcomes)) if *last == precision => outcomes.push(outcome),
            _ => self.rows.push((precision, vec![outcome])),
        }
    }
}

/// The mean of a value over the seeds.
fn mean(outcomes: &[Outcome], value: impl Fn(&Outcome) -> f64) -> f64 {
    outcomes.iter().map(value).sum::<f64>() / outcomes.len() as f64
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Held-out accuracy in %, training loss of the last epoch")?;
        write!(f, "{:<12}", "precision")?;
        for seed in 0..self.seeds {
            write!(f, "{:>9}", format!("seed {seed}"))?;
        }
        writeln!(
            f,
            "{:>9}{:>9}{:>9}{:>9}",
            "mean", "loss", "skipped", "seconds"
        )?;
        for (precision, outcomes) in &self.rows {
            write!(f, "{precision:<12}")?;
            for outcome in outcomes {
                write!(f, "{:>9.2}", 100.0 * outcome.accuracy)?;
            }
            let skipped: u64 = outcomes.iter().map(|outcome| outcome.skipped).sum();
            writeln!(
                f,
                "{:>9.2}{:>9.4}{skipped:>9}{:>9.1}",
                100.0 * mean(outcomes, |outcome| outcome.accuracy),
                mean(outcomes, |outcome| outcome.loss),
                mean(outcomes, |outcome| outcome.wall.as_secs_f64()),
            )?;
        }
        Ok(())
    }
}
