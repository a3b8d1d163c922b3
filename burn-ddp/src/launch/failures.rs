//! Decides which of the ranks that failed is reported.

use std::{os::unix::process::ExitStatusExt, process::ExitStatus};

/// A rank, and how it ended.
pub(super) type End = (usize, ExitStatus);

/// The ranks that failed, in the order in which they ended.
#[derive(Default)]
pub(super) struct Failures(Vec<End>);

impl Failures {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds those of the `ended` ranks that failed. As far as the launcher can tell, these ranks ended at the same time.
    pub(super) fn add(&mut self, ended: impl IntoIterator<Item = End>) {
        let failed = ended.into_iter().filter(|(_, status)| !status.success());
        let mut failed: Vec<End> = failed.collect();
        // A rank that was killed by a signal comes first: it explains the errors of the others.
        failed.sort_by_key(|(_, status)| status.signal().is_none());
        self.0.extend(failed);
    }

    /// The rank that failed first. A rank that blames another failed rank counts as failing after it.
    pub(super) fn first(&self, blamed_by: impl Fn(usize) -> Option<usize>) -> Option<End> {
        let mut first = *self.0.first()?;
        // Bounded, because ranks that blame each other form a cycle.
        for _ in &self.0 {
            let blamed = blamed_by(first.0);
            match self.0.iter().find(|(rank, _)| Some(*rank) == blamed) {
                Some(earlier) => first = *earlier,
                None => break,
            }
        }
        Some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A status with this exit code, as the system encodes it.
    fn exit(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    fn killed() -> ExitStatus {
        ExitStatus::from_raw(9)
    }

    fn first(ended: &[&[End]], blames: &[(usize, usize)]) -> Option<usize> {
        let mut failures = Failures::default();
        for together in ended {
            failures.add(together.iter().copied());
        }
        let blamed_by = |rank| {
            let found = blames.iter().find(|(by, _)| *by == rank);
            found.map(|(_, blamed)| *blamed)
        };
        failures.first(blamed_by).map(|(rank, _)| rank)
    }

    #[test]
    fn who_ended_first_failed_first() {
        assert_eq!(first(&[], &[]), None);
        assert_eq!(first(&[&[(0, exit(0)), (1, exit(0))]], &[]), None);
        let apart: [&[End]; 3] = [&[(0, exit(0))], &[(2, exit(1))], &[(1, killed())]];
        assert_eq!(first(&apart, &[]), Some(2));
        let together: [&[End]; 1] = [&[(0, exit(0)), (1, exit(1)), (2, exit(1))]];
        assert_eq!(first(&together, &[]), Some(1));
        let one_killed: [&[End]; 1] = [&[(0, exit(1)), (1, killed()), (2, killed())]];
        assert_eq!(first(&one_killed, &[]), Some(1));
    }

    #[test]
    fn who_is_blamed_failed_before() {
        let ends: [&[End]; 2] = [&[(0, exit(1)), (3, exit(1))], &[(2, exit(1)), (1, exit(7))]];
        assert_eq!(first(&ends, &[(0, 1), (3, 1), (2, 1)]), Some(1));
        assert_eq!(first(&ends, &[(0, 2), (2, 3)]), Some(3));
        // Rank 8 is on another machine, or has not failed.
        assert_eq!(first(&ends, &[(0, 8)]), Some(0));
        assert!(first(&ends, &[(0, 1), (1, 0)]).is_some());
    }
}
