//! Goals for ratios.

use std::fmt::{self, Display};

/// The goal for a ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// At most this.
    AtMost(f64),
    /// At least this.
    AtLeast(f64),
}

impl Goal {
    /// Whether a ratio meets the goal. NaN does not.
    pub fn is_met(self, ratio: f64) -> bool {
        match self {
            Self::AtMost(most) => ratio <= most,
            Self::AtLeast(least) => ratio >= least,
        }
    }
}

impl Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "at most {most:.3}"),
            Self::AtLeast(least) => write!(f, "at least {least:.3}"),
        }
    }
}

/// Ratios and their goals, printed as a table.
///
/// ```
/// use benches::{Goal, Goals};
///
/// let mut goals = Goals::new("casts");
/// goals.add("of a copy's rate", [0.81, 0.82, 0.85], Goal::AtLeast(0.8));
/// assert!(goals.to_string().ends_with("| of a copy's rate | 0.820 | 0.810 to 0.850 | at least 0.800 | met |\n"));
/// ```
pub struct Goals {
    subject: String,
    rows: Vec<Row>,
}

/// The smallest number of rounds in which a ratio of times is judged.
const JUDGED: usize = 3;

struct Row {
    name: String,
    ratio: [f64; 3],
    goal: Goal,
    /// For a ratio of times: the number of rounds in which they were taken.
    rounds: Option<usize>,
}

impl Row {
    fn outcome(&self) -> String {
        match self.rounds {
            Some(0) => "not judged: each by itself".into(),
            Some(1) => "not judged: 1 round".into(),
            Some(rounds) if rounds < JUDGED => format!("not judged: {rounds} rounds"),
            _ if self.goal.is_met(self.ratio[1]) => "met".into(),
            _ => "missed".into(),
        }
    }
}

impl Goals {
    /// A table without goals yet. `subject` says what they are about.
    pub fn new(subject: &str) -> Self {
        Self {
            subject: subject.into(),
            rows: Vec::new(),
        }
    }

    /// Adds a ratio (lower quartile, median, upper quartile) and its goal. The median is judged.
    pub fn add(&mut self, name: &str, ratio: [f64; 3], goal: Goal) {
        self.push(name, ratio, goal, None);
    }

    /// Like [`add`](Self::add), if there is a ratio.
    pub fn add_if_known(&mut self, name: &str, ratio: Option<[f64; 3]>, goal: Goal) {
        if let Some(ratio) = ratio {
            self.add(name, ratio, goal);
        }
    }

    /// Like [`add_if_known`](Self::add_if_known), for times that were taken in `rounds` rounds, or 0 if each was taken by itself.
    /// A ratio of fewer than 3 rounds is printed, but not judged.
    pub fn add_timed(&mut self, name: &str, ratio: Option<[f64; 3]>, rounds: usize, goal: Goal) {
        if let Some(ratio) = ratio {
            self.push(name, ratio, goal, Some(rounds));
        }
    }

    fn push(&mut self, name: &str, ratio: [f64; 3], goal: Goal, rounds: Option<usize>) {
        let name = name.into();
        self.rows.push(Row {
            name,
            ratio,
            goal,
            rounds,
        });
    }
}

/// The ratio of two measurements that were not taken in turn, both given as quartiles. Its spread combines both of theirs.
///
/// ```
/// assert_eq!(benches::unpaired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 4.0]), [0.5, 2.0, 6.0]);
/// ```
pub fn unpaired_ratio(of: [f64; 3], to: [f64; 3]) -> [f64; 3] {
    [of[0] / to[2], of[1] / to[1], of[2] / to[0]]
}

impl Display for Goals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rows.is_empty() {
            return Ok(());
        }
        writeln!(f, "Which goals are met? {}\n", self.subject)?;
        writeln!(
            f,
            "| | ratio | middle half | goal | outcome |\n|---|---|---|---|---|"
        )?;
        for row in &self.rows {
            let Row {
                name,
                ratio: [low, ratio, high],
                goal,
                ..
            } = row;
            let spread = match low == high {
                true => String::new(),
                false => format!("{low:.3} to {high:.3}"),
            };
            let outcome = row.outcome();
            writeln!(f, "| {name} | {ratio:.3} | {spread} | {goal} | {outcome} |")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_met_or_missed() {
        for (goal, ratio, expected) in [
            (Goal::AtMost(0.5), 0.5, true),
            (Goal::AtMost(0.5), 0.51, false),
            (Goal::AtLeast(1.2), 1.21, true),
            (Goal::AtLeast(1.2), 1.19, false),
            (Goal::AtLeast(1.2), f64::NAN, false),
            (Goal::AtMost(1.2), f64::NAN, false),
        ] {
            assert_eq!(goal.is_met(ratio), expected, "{goal}: {ratio}");
        }
    }

    #[test]
    fn what_was_not_measured_is_not_judged() {
        let mut goals = Goals::new("a step");
        goals.add_if_known("time", None, Goal::AtMost(0.5));
        assert_eq!(goals.to_string(), "");
        goals.add_if_known("memory", Some([0.7; 3]), Goal::AtMost(0.6));
        let printed = goals.to_string();
        assert!(
            printed.contains("| memory | 0.700 |  | at most 0.600 | missed |"),
            "{printed}"
        );
    }

    #[test]
    fn times_of_few_rounds_are_not_judged() {
        for (rounds, expected) in [
            (0, "not judged: each by itself"),
            (1, "not judged: 1 round"),
            (2, "not judged: 2 rounds"),
            (3, "met"),
        ] {
            let mut goals = Goals::new("a step");
            goals.add_timed("unknown", None, rounds, Goal::AtMost(0.5));
            goals.add_timed("time", Some([0.4; 3]), rounds, Goal::AtMost(0.5));
            let printed = goals.to_string();
            let line = format!("| time | 0.400 |  | at most 0.500 | {expected} |\n");
            assert!(printed.ends_with(&line), "{printed}");
            assert!(!printed.contains("unknown"), "{printed}");
        }
    }
}
