//! Compares ways to do one job, timed in turn.

use std::{
    fmt::{self, Display},
    time::{Duration, Instant},
};

use crate::{is_unchecked, quartiles};

/// The least time that jobs queued together should take: waiting for them takes microseconds.
const QUEUE: Duration = Duration::from_millis(5);
/// The largest number of jobs that are queued together, because their results are kept.
const MOST_QUEUED: u32 = 256;

/// Ways to do one job, timed in turn. Each round does the job once in every way, and only times of the same round are compared,
/// so that a temporary slowdown of the machine affects all ways alike.
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
    limit: Option<Duration>,
}

/// The result of a [`Comparison`].
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// The question.
    pub question: String,
    /// The number of times that each way was timed.
    pub rounds: usize,
    /// The ways. The others are compared with the first.
    pub rows: Vec<Row>,
    /// Additional columns: a title, and a cell for each way.
    pub columns: Vec<(String, Vec<String>)>,
}

/// One way to do the job.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// The median of its times.
    pub median: Duration,
    /// The ratio of its time to that of the first way in the same round: lower quartile, median, upper quartile.
    pub ratio: [f64; 3],
    /// Its times, round by round, in seconds.
    pub times: Vec<f64>,
}

impl Row {
    /// The ratio of this way's time to another way's in the same round: lower quartile, median, upper quartile.
    pub fn ratio_to(&self, other: &Self) -> [f64; 3] {
        quartiles(self.times.iter().zip(&other.times).map(|(a, b)| a / b))
    }
}

impl Table {
    /// The row of a way.
    pub fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// The ratio of a way's time to another's in the same round, if both were measured: lower quartile, median, upper quartile.
    pub fn ratio(&self, of: &str, to: &str) -> Option<[f64; 3]> {
        Some(self.row(of)?.ratio_to(self.row(to)?))
    }

    /// Adds a column, with a cell for each way.
    pub fn with_column(mut self, title: &str, cell: impl Fn(&Row) -> String) -> Self {
        let cells = self.rows.iter().map(cell).collect();
        self.columns.push((title.into(), cells));
        self
    }
}

impl<'a> Comparison<'a> {
    /// A comparison for a question, with the way that others are compared with.
    pub fn new(question: &str, baseline: &str, job: impl FnMut() + 'a) -> Self {
        Self::empty(question).with(baseline, job)
    }

    /// A comparison for a question. Others are compared with the first way that is added.
    pub fn empty(question: &str) -> Self {
        Self {
            question: question.into(),
            ways: Vec::new(),
            limit: None,
        }
    }

    /// Limits the time. No round begins later than this after the first timed one, which runs in any case.
    pub fn within(mut self, limit: Option<Duration>) -> Self {
        self.limit = limit;
        self
    }

    /// Adds a way.
    pub fn with(self, name: &str, mut job: impl FnMut() + 'a) -> Self {
        self.with_time(name, move || {
            let start = Instant::now();
            job();
            start.elapsed()
        })
    }

    /// Adds a way that times itself.
    pub fn with_time(mut self, name: &str, job: impl FnMut() -> Duration + 'a) -> Self {
        self.ways.push((name.into(), Box::new(job)));
        self
    }

    /// Adds a way whose job only queues work, as on a GPU. Several jobs are queued before `finish` waits for all of them: enough
    /// to take 5 ms (found while warming up), but at most 256. The time is that of one job. The results are
    /// then passed to `check`, which is not timed: a device only reports failures then.
    pub fn with_queue<T>(
        self,
        name: &str,
        mut job: impl FnMut() -> T + 'a,
        mut finish: impl FnMut() + 'a,
        mut check: impl FnMut(T) + 'a,
    ) -> Self {
        let mut batch = move |at_once: u32| {
            let start = Instant::now();
            let results: Vec<T> = (0..at_once).map(|_| job()).collect();
            finish();
            let time = start.elapsed();
            results.into_iter().for_each(&mut check);
            time
        };
        let mut found = None;
        self.with_time(name, move || {
            let at_once = *found.get_or_insert_with(|| {
                // The first job sets up what later ones reuse.
                batch(1);
                let mut at_once = 1;
                while at_once < MOST_QUEUED && batch(at_once) < QUEUE {
                    at_once *= 2;
                }
                at_once
            });
            batch(at_once) / at_once
        })
    }

    /// Does the job once in every way, to warm up, and then `rounds` times, or fewer if the [time](Self::within) is up; once more if
    /// [nothing is computed](is_unchecked).
    pub fn run(mut self, rounds: usize) -> Table {
        let rounds = if is_unchecked() { 1 } else { rounds };
        let mut times: Vec<Vec<f64>> = vec![Vec::with_capacity(rounds); self.ways.len()];
        let mut start = Instant::now();
        for round in 0..=rounds {
            if round > 1 && self.limit.is_some_and(|limit| start.elapsed() >= limit) {
                break;
            }
            // Each round begins with another way.
            for turn in 0..self.ways.len() {
                let way = (turn + round) % self.ways.len();
                let time = (self.ways[way].1)();
                if round > 0 {
                    times[way].push(time.as_secs_f64());
                }
            }
            if round == 0 {
                start = Instant::now();
            }
        }
        let names = self.ways.into_iter().map(|(name, _)| name);
        let mut rows: Vec<Row> = names
            .zip(times)
            .map(|(name, times)| Row {
                name,
                median: Duration::from_secs_f64(quartiles(times.iter().copied())[1].max(0.0)),
                ratio: [1.0; 3],
                times,
            })
            .collect();
        for way in 1..rows.len() {
            rows[way].ratio = rows[way].ratio_to(&rows[0]);
        }
        Table {
            rounds: rows.first().map_or(0, |row| row.times.len()),
            rows,
            question: self.question,
            columns: Vec::new(),
        }
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({} rounds)\n", self.question, self.rounds)?;
        write!(f, "| | median | ratio | middle half of the ratios |")?;
        self.columns
            .iter()
            .try_for_each(|(title, _)| write!(f, " {title} |"))?;
        writeln!(
            f,
            "\n|---|---|---|---|{}",
            "---|".repeat(self.columns.len())
        )?;
        for (number, row) in self.rows.iter().enumerate() {
            let [low, ratio, high] = row.ratio;
            let spread = match number {
                0 => String::new(),
                _ => format!("{low:.3} to {high:.3}"),
            };
            let (name, median) = (&row.name, row.median);
            write!(f, "| {name} | {median:.3?} | {ratio:.3} | {spread} |")?;
            self.columns
                .iter()
                .try_for_each(|(_, cells)| write!(f, " {} |", cells[number]))?;
            writeln!(f)?;
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

        let (started, seen, checked) = (Cell::new(0), RefCell::new(vec![0]), Cell::new(0));
        let table = Comparison::empty("?")
            .with_queue(
                "queued",
                || started.set(started.get() + 1),
                || seen.borrow_mut().push(started.get()),
                |()| {
                    // Only called after all jobs are finished.
                    assert_eq!(seen.borrow().last(), Some(&started.get()));
                    checked.set(checked.get() + 1);
                },
            )
            .run(2);
        assert_eq!((table.rounds, checked.get()), (2, started.get()));
        let batches: Vec<u32> = seen.borrow().windows(2).map(|w| w[1] - w[0]).collect();
        let [.., warm, first, second] = batches[..] else {
            panic!("three rounds")
        };
        // These jobs take no time, so as many as allowed are queued.
        assert!(warm == first && first == second, "{batches:?}");
        assert!(batches[..2] == [1, 1] && second > 1, "{batches:?}");
    }

    #[test]
    fn the_time_cuts_rounds_and_no_rows() {
        let ms = Duration::from_millis;
        let table = Comparison::empty("?")
            .with_time("this", move || ms(2))
            .with_time("that", move || ms(3))
            .within(Some(Duration::ZERO))
            .run(5);
        assert_eq!(table.rounds, 1);
        assert_eq!(table.ratio("that", "this"), Some([1.5; 3]));
        assert_eq!(table.ratio("that", "nothing"), None);
        let table = table.with_column("rate", |row| format!("{:.0}/s", 1.0 / row.times[0]));
        assert!(
            table
                .to_string()
                .contains("| that | 3.000ms | 1.500 | 1.500 to 1.500 | 333/s |"),
            "{table}"
        );
    }
}
