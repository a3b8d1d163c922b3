//! [`Ends`]: what is computed, and ends its kernel, before the next op of a network.

use burn_std::id::StreamId;
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};

/// The most that are kept. Nobody says when a stream ends with its thread.
const MOST: usize = 256;

/// Something that is computed, and ends the kernel that it is computed in, not later than before the next op of a network. It must
/// not hold tensors of the layered device, which live as long as it is kept.
pub(crate) trait End: Send + Sync {
    fn compute(&self);

    /// Ends the kernel. Called after everything that is due was computed: a kernel may be common to several.
    fn end(&self);
}

/// What is due before the next op of a network, each on its stream.
#[derive(Default)]
pub(crate) struct Ends(Mutex<VecDeque<(StreamId, Arc<dyn End>)>>);

impl Ends {
    /// Has `end` called on the stream of this thread when it is due. It may be forgotten.
    pub(crate) fn later(&self, end: Arc<dyn End>) {
        let mut ends = self.0.lock();
        if ends.len() == MOST {
            ends.pop_front();
        }
        ends.push_back((StreamId::current(), end));
    }

    /// Computes and ends what is due on the stream of this thread.
    pub(crate) fn now(&self) {
        let stream = StreamId::current();
        let mut due = Vec::new();
        let mut ends = self.0.lock();
        let others = ends.drain(..).filter_map(|(of, end)| match of == stream {
            true => {
                due.push(end);
                None
            }
            false => Some((of, end)),
        });
        *ends = others.collect();
        drop(ends);
        due.iter().for_each(|end| end.compute());
        due.iter().for_each(|end| end.end());
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes down, by a name, when it is computed and ended.
    struct Noted(&'static str, Arc<Mutex<Vec<String>>>);

    impl End for Noted {
        fn compute(&self) {
            self.1.lock().push(format!("compute {}", self.0));
        }

        fn end(&self) {
            self.1.lock().push(format!("end {}", self.0));
        }
    }

    #[test]
    fn each_is_called_once_and_on_its_stream() {
        let (ends, notes) = (Ends::default(), Arc::new(Mutex::new(Vec::new())));
        let later = |name| ends.later(Arc::new(Noted(name, notes.clone())));
        let noted = || core::mem::take(&mut *notes.lock());
        later("a");
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                later("b");
                later("c");
                ends.now();
                assert_eq!(noted(), ["compute b", "compute c", "end b", "end c"]);
            });
            other.join().unwrap();
        });
        ends.now();
        assert_eq!(noted(), ["compute a", "end a"]);
        ends.now();
        later("d");
        ends.clear();
        ends.now();
        assert!(noted().is_empty());
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let (ends, notes) = (Ends::default(), Arc::new(Mutex::new(Vec::new())));
        for name in core::iter::repeat_n("old", 3).chain(core::iter::repeat_n("new", MOST)) {
            ends.later(Arc::new(Noted(name, notes.clone())));
        }
        ends.now();
        let notes = notes.lock();
        assert_eq!(notes.len(), 2 * MOST);
        assert!(notes.iter().all(|note| note.ends_with("new")));
    }
}
