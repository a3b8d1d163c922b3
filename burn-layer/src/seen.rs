//! [`Seen`]: a set of streams.

use burn_std::id::StreamId;
use std::collections::HashSet;

/// The number of streams that are remembered.
const MOST: usize = 1024;

/// Streams of which ops were seen. Nobody says when a stream ends with its thread, so the set is emptied when it is full. A stream
/// that goes on is back with its next op.
#[derive(Default)]
pub(crate) struct Seen(HashSet<StreamId>);

impl Seen {
    pub(crate) fn insert(&mut self, stream: StreamId) {
        if self.0.len() == MOST && !self.0.contains(&stream) {
            self.0.clear();
        }
        self.0.insert(stream);
    }

    pub(crate) fn remove(&mut self, stream: StreamId) {
        self.0.remove(&stream);
    }

    pub(crate) fn contains(&self, stream: StreamId) -> bool {
        self.0.contains(&stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_that_ended_are_forgotten() {
        let stream = |value| StreamId { value };
        let mut seen = Seen::default();
        for value in 0..3 * MOST as u64 {
            seen.insert(stream(value));
            assert!(seen.contains(stream(value)) && seen.0.len() <= MOST);
        }
        assert!(!seen.contains(stream(0)));
        seen.insert(stream(7));
        seen.remove(stream(7));
        assert!(!seen.contains(stream(7)));
    }
}
