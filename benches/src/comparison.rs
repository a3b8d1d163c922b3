//! Ways to do one job, timed in turn.

use std::{
    fmt::{self, Display},
    time::{Duration, Instant},
};

/// Ways to do one job, timed in turn: each round does the job every way once, so that what slows the machine for a
/// while slows all of them, and only ratios within a round are compared.
///
/// ```
/// use benches::Comparison;
///
/// let numbers: Vec<u32> = (0..1_000).collect();
/// let result = Comparison::new("What does sorting cost?", "copy", || drop(numbers.clone()))
///     .with("copy and sort", || numbers.clone().sort_unstable_by(|a, b| b.cmp(a)))
///     .run(5);
/// assert_eq!(result.rows.len(), 2);
/// println!("{result}");
/// ```
pub struct Comparison<'a> {
    question: String,
    ways: Vec<(String, Box<dyn FnMut() -> Duration + 'a>)>,
}

/// What a [`Comparison`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// What was asked.
    pub question: String,
    /// How often each way was timed.
    pub rounds: usize,
    /// The ways; the first is what the others are compared with.
    pub rows: Vec<Row>,
}

/// One way to do the job.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// The median of its times.
    pub median: Duration,
    /// Its time over that of the first way in the same round: lower quartile, median, upper quartile.
    pub ratio: [f64; 3],
}

impl<'a> Comparison<'a> {
    /// The question, and the way that the others are compared with.
    pub fn new(question: &str, baseline: &str, job: impl FnMut() + 'a) -> Self {
        Self::empty(question).with(baseline, job)
    }

    /// The question alone: the first way that is added is what the others are compared with.
    pub fn empty(question: &str) -> Self {
        Self {
            question: question.into(),
            ways: Vec::new(),
        }
    }

    /// Another way.
    pub fn with(self, name: &str, mut job: impl FnMut() + 'a) -> Self {
        self.with_time(name, move || {
            let start = Instant::now();
            job();
            start.elapsed()
        })
    }

    /// Another way, which times itself.
    pub fn with_time(mut self, name: &str, job: impl FnMut() -> Duration + 'a) -> Self {
        self.ways.push((name.into(), Box::new(job)));
        self
    }

    /// Another way, whose job only starts something, as on a GPU: `at_once` are started before `finish` waits for all of
    /// them; what they gave is dropped then. The time is that of one.
    pub fn with_queue<T>(
        self,
        name: &str,
        at_once: u32,
        mut job: impl FnMut() -> T + 'a,
        mut finish: impl FnMut() + 'a,
    ) -> Self {
        self.with_time(name, move || {
            let start = Instant::now();
            let results: Vec<T> = (0..at_once).map(|_| job()).collect();
            finish();
            let time = start.elapsed() / at_once;
            drop(results);
            time
        })
    }

    /// Does the job every way once, to warm up, and then `rounds` times.
    pub fn run(mut self, rounds: usize) -> Table {
        let mut times: Vec<Vec<Duration>> = vec![Vec::with_capacity(rounds); self.ways.len()];
        for round in 0..=rounds {
            // Another one goes first each time: none always comes after the same.
            for turn in 0..self.ways.len() {
                let way = (turn + round) % self.ways.len();
                let time = (self.ways[way].1)();
                if round > 0 {
                    times[way].push(time);
                }
            }
        }
        let rows = self.ways.iter().zip(&times).map(|((name, _), own)| {
            let ratios = own.iter().zip(&times[0]);
            Row {
                name: name.clone(),
                median: quartiles(
                    own.iter().map(Duration::as_secs_f64),
                    Duration::from_secs_f64,
                )[1],
                ratio: quartiles(
                    ratios.map(|(a, b)| a.as_secs_f64() / b.as_secs_f64()),
                    |r| r,
                ),
            }
        });
        Table {
            rows: rows.collect(),
            question: self.question,
            rounds,
        }
    }
}

/// Lower quartile, median and upper quartile, with linear interpolation.
fn quartiles<T>(values: impl Iterator<Item = f64>, to: impl Fn(f64) -> T) -> [T; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    [0.25, 0.5, 0.75].map(|part| {
        let at = part * (values.len() - 1) as f64;
        let (below, above) = (values[at.floor() as usize], values[at.ceil() as usize]);
        to(below + (above - below) * at.fract())
    })
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({} rounds)\n", self.question, self.rounds)?;
        writeln!(
            f,
            "| | median | ratio | middle half of the ratios |\n|---|---|---|---|"
        )?;
        for (number, row) in self.rows.iter().enumerate() {
            let [low, ratio, high] = row.ratio;
            let spread = match number {
                0 => String::new(),
                _ => format!("{low:.3} to {high:.3}"),
            };
            writeln!(
                f,
                "| {} | {:.3?} | {ratio:.3} | {spread} |",
                row.name, row.median
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_those_of_the_same_round() {
        let ms = Duration::from_millis;
        // The first round warms up. The machine is twice as slow in every second round.
        let mut slow = [9, 10, 20, 10, 20, 10].map(ms).into_iter();
        let mut fast = [9, 5, 10, 5, 10, 20].map(ms).into_iter();
        let table = Comparison::empty("?")
            .with_time("slow", move || slow.next().unwrap())
            .with_time("fast", move || fast.next().unwrap())
            .run(5);
        let [slow, fast] = &table.rows[..] else {
            panic!("two ways")
        };
        assert_eq!((slow.median, slow.ratio), (ms(10), [1.0; 3]));
        assert_eq!((fast.median, fast.ratio), (ms(10), [0.5; 3]));
        assert!(
            table
                .to_string()
                .contains("| fast | 10.000ms | 0.500 | 0.500 to 0.500 |")
        );
    }

    #[test]
    fn queued_jobs_are_finished_together() {
        use std::cell::{Cell, RefCell};

        let (started, seen) = (Cell::new(0), RefCell::new(Vec::new()));
        let table = Comparison::empty("?")
            .with_queue(
                "queued",
                4,
                || started.set(started.get() + 1),
                || seen.borrow_mut().push(started.get()),
            )
            .run(2);
        assert_eq!(*seen.borrow(), [4, 8, 12]);
        assert_eq!(table.rows[0].ratio, [1.0; 3]);
    }

    #[test]
    fn quartiles_interpolate_as_numpy_does() {
        // numpy.percentile([1, 2, 4, 8], [25, 50, 75])
        let values = [8.0, 1.0, 4.0, 2.0];
        assert_eq!(quartiles(values.into_iter(), |v| v), [1.75, 3.0, 5.0]);
    }
}
