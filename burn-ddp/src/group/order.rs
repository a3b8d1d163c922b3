//! Calls are made one at a time, in the order in which they were submitted.

use std::sync::{Condvar, Mutex};

/// Hands out turns.
#[derive(Default)]
pub(crate) struct Order {
    turns: Mutex<Turns>,
    changed: Condvar,
}

#[derive(Default)]
struct Turns {
    given: u64,
    served: u64,
}

/// A turn: to be waited for, and over when dropped.
pub(crate) struct Turn<'a> {
    order: &'a Order,
}

impl Order {
    /// Takes the next place in the queue.
    pub(crate) fn take(&self) -> u64 {
        let mut turns = self.turns.lock().expect("no panic under lock");
        turns.given += 1;
        turns.given - 1
    }

    /// Waits until all earlier turns are over.
    pub(crate) fn wait(&self, place: u64) -> Turn<'_> {
        let turns = self.turns.lock().expect("no panic under lock");
        let waited = self
            .changed
            .wait_while(turns, |turns| turns.served != place);
        drop(waited.expect("no panic under lock"));
        Turn { order: self }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut turns = self.order.turns.lock().expect("no panic under lock");
        turns.served += 1;
        self.order.changed.notify_all();
    }
}
