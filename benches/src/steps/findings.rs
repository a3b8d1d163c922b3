//! The results of all ways.

use super::Event;
use crate::{Precision, quartiles, unpaired_ratio};

/// The results of all ways to train a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    /// The results of ways by themselves.
    pub alone: Vec<Alone>,
    /// The seconds that a step of each way took, round by round.
    pub rounds: Vec<Vec<(Precision, f64)>>,
    /// The ways that failed, and the reasons.
    pub failed: Vec<(Precision, String)>,
    /// The ways that there was no time for.
    pub left_out: Vec<Precision>,
}

/// The result of a way by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Alone {
    /// The way.
    pub way: Precision,
    /// The seconds that each step took.
    pub seconds: Vec<f64>,
    /// The peak memory in bytes; 0 if the device does not report it.
    pub bytes: u64,
    /// How often the device was polled in a step.
    pub polls: f64,
}

impl Findings {
    /// Adds what an event reports.
    pub fn hear(&mut self, event: Event) {
        match event {
            Event::Begins(_) => {}
            Event::Alone {
                way,
                seconds,
                bytes,
                polls,
            } => self.alone.push(Alone {
                way,
                seconds,
                bytes,
                polls,
            }),
            Event::LeftOut(ways) => self.left_out.extend(ways),
            Event::Round(times) => self.rounds.push(times),
            Event::Failed { way, why } => self.failed.push((way, why)),
        }
    }

    /// The result of a way by itself, if it was measured.
    pub fn alone(&self, way: Precision) -> Option<&Alone> {
        self.alone.iter().find(|alone| alone.way == way)
    }

    /// Whether a way failed, by itself or in turn.
    pub fn has_failed(&self, way: Precision) -> bool {
        self.failed.iter().any(|(failed, _)| *failed == way)
    }

    /// The number of rounds in which a way was timed.
    pub fn rounds_of(&self, way: Precision) -> usize {
        self.times(way).count()
    }

    /// The number of rounds in which both ways were timed.
    pub fn rounds_of_both(&self, way: Precision, other: Precision) -> usize {
        self.pairs(way, other).count()
    }

    /// The seconds that a step takes (lower quartile, median, upper quartile), timed in turn with others or, if it was not, by
    /// itself.
    pub fn seconds(&self, way: Precision) -> Option<[f64; 3]> {
        if self.rounds_of(way) > 0 {
            return Some(quartiles(self.times(way)));
        }
        let alone = self.alone(way)?;
        Some(quartiles(alone.seconds.iter().copied()))
    }

    /// The ratio of a way's time to another's (lower quartile, median, upper quartile): within rounds or, if they share none, of
    /// their [`seconds`](Self::seconds).
    pub fn ratio(&self, of: Precision, to: Precision) -> Option<[f64; 3]> {
        if self.rounds_of_both(of, to) == 0 {
            return Some(unpaired_ratio(self.seconds(of)?, self.seconds(to)?));
        }
        Some(quartiles(self.pairs(of, to)))
    }

    /// The ratio of a way's peak memory to another's, if the device reports it.
    pub fn memory_ratio(&self, of: Precision, to: Precision) -> Option<f64> {
        let bytes = |way| Some(self.alone(way)?.bytes).filter(|bytes| *bytes > 0);
        Some(bytes(of)? as f64 / bytes(to)? as f64)
    }

    /// The ratio of a way's time to another's, in each round that has both.
    fn pairs(&self, of: Precision, to: Precision) -> impl Iterator<Item = f64> {
        let rounds = self.rounds.iter();
        rounds.filter_map(move |round| Some(time(round, of)? / time(round, to)?))
    }

    fn times(&self, way: Precision) -> impl Iterator<Item = f64> {
        self.rounds.iter().filter_map(move |round| time(round, way))
    }
}

fn time(round: &[(Precision, f64)], way: Precision) -> Option<f64> {
    let (_, time) = round.iter().find(|(of, _)| *of == way)?;
    Some(*time)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Precision::{Bf16, O0, Plain};

    #[test]
    fn ratios_are_within_rounds_where_ways_share_some() {
        let alone = |way, second| Event::Alone {
            way,
            seconds: vec![second; 3],
            bytes: 100 * second as u64,
            polls: 2.0,
        };
        let mut findings = Findings::default();
        findings.hear(alone(Plain, 4.0));
        findings.hear(alone(Bf16, 1.0));
        assert_eq!(findings.ratio(Bf16, Plain), Some([0.25; 3]));
        assert_eq!(findings.memory_ratio(Bf16, Plain), Some(0.25));
        assert_eq!(findings.ratio(O0, Plain), None);
        assert_eq!(findings.rounds_of_both(Bf16, Plain), 0);
        // The machine is slower in the second round; O0 is in the first alone.
        findings.hear(Event::Round(vec![(Plain, 2.0), (Bf16, 1.0), (O0, 3.0)]));
        findings.hear(Event::Round(vec![(Bf16, 5.0), (Plain, 10.0)]));
        assert_eq!(findings.ratio(Bf16, Plain), Some([0.5; 3]));
        assert_eq!(findings.seconds(Bf16), Some([2.0, 3.0, 4.0]));
        assert_eq!(findings.ratio(O0, Plain), Some([1.5; 3]));
        assert_eq!([Plain, O0].map(|way| findings.rounds_of(way)), [2, 1]);
        let both = [Plain, O0].map(|way| findings.rounds_of_both(Bf16, way));
        assert_eq!(both, [2, 1]);
    }
}
