//! Measures how much of the communication is hidden by backward.

use std::time::Duration;

/// When a backward pass sent its buckets, and when their averages arrived. All times count from the first
/// gradient of the pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// The buckets, in the order in which they were sent.
    pub buckets: Vec<BucketTimes>,
    /// When backward had submitted its last gradient.
    pub backward_end: Duration,
}

/// The times of one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketTimes {
    /// Its size in bytes.
    pub bytes: usize,
    /// When it was full and its all-reduce started, or was queued behind the one before.
    pub launched: Duration,
    /// When the averages arrived, if they have.
    pub finished: Option<Duration>,
}

impl Timeline {
    /// The fraction of the communication time that was hidden by backward, from 0 to 1.
    pub fn hidden(&self) -> f64 {
        let (mut hidden, mut total) = (0.0, 0.0);
        let mut free = Duration::ZERO;
        for bucket in &self.buckets {
            // All-reduces run one at a time: each starts when the one before it is done.
            let start = bucket.launched.max(free);
            let end = bucket.finished.unwrap_or(start).max(start);
            total += (end - start).as_secs_f64();
            hidden += self
                .backward_end
                .clamp(start, end)
                .saturating_sub(start)
                .as_secs_f64();
            free = end;
        }
        match total > 0.0 {
            true => hidden / total,
            false => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_is_the_part_before_the_end_of_backward() {
        let ms = Duration::from_millis;
        let bucket = |launched, finished| BucketTimes {
            bytes: 1,
            launched: ms(launched),
            finished: Some(ms(finished)),
        };
        let timeline = |buckets| Timeline {
            buckets,
            backward_end: ms(100),
        };
        assert_eq!(timeline(vec![]).hidden(), 1.0);
        assert_eq!(timeline(vec![bucket(10, 60)]).hidden(), 1.0);
        assert_eq!(timeline(vec![bucket(100, 120)]).hidden(), 0.0);
        assert_eq!(timeline(vec![bucket(80, 120)]).hidden(), 0.5);
        // The second had to wait for the first.
        assert_eq!(
            timeline(vec![bucket(50, 90), bucket(60, 110)]).hidden(),
            50.0 / 60.0
        );
    }
}
