//! A queue that runs calls one at a time, in the order in which they were submitted.

use std::{
    cell::Cell,
    collections::BTreeSet,
    sync::{Arc, Condvar, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use crate::DdpError;

/// Hands out places in a queue.
#[derive(Clone, Default)]
pub(super) struct Order {
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    turns: Mutex<Turns>,
    changed: Condvar,
}

#[derive(Default)]
struct Turns {
    given: u64,
    /// The place whose turn it is.
    served: u64,
    /// Whether the call of that place has begun. From then on, the call's own time limit applies.
    begun: bool,
    /// Later places that were given up before their turn.
    given_up: BTreeSet<u64>,
}

/// Why the turn of a place does not come.
#[derive(Debug)]
pub(super) enum Obstacle {
    /// The group has a fault.
    Fault(DdpError),
    /// The call whose turn it is has not begun.
    NotBegun,
}

/// How often a waiting place checks for faults.
const LOOK: Duration = Duration::from_millis(100);

/// A place in the queue. Dropping it gives it up, whether its turn has come or not.
pub(super) struct Place {
    queue: Arc<Queue>,
    number: u64,
}

thread_local! {
    /// The place that is reserved for the call that this thread is about to make.
    static RESERVED: Cell<Option<Place>> = const { Cell::new(None) };
}

impl Queue {
    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().expect("no panic under lock")
    }
}

impl Order {
    /// Takes the place that is reserved for this thread in this queue, or else the next one.
    pub(super) fn take(&self) -> Place {
        match RESERVED.take() {
            Some(place) if Arc::ptr_eq(&place.queue, &self.queue) => return place,
            other => RESERVED.set(other),
        }
        let mut turns = self.queue.turns();
        let number = turns.given;
        turns.given += 1;
        drop(turns);
        Place {
            queue: self.queue.clone(),
            number,
        }
    }
}

impl Place {
    /// Runs code whose first call takes this place, although later places have been taken since.
    pub(super) fn reserve_for<R>(self, code: impl FnOnce() -> R) -> R {
        /// The code may make no call, or panic: then the place must be given up.
        struct GiveUp;

        impl Drop for GiveUp {
            fn drop(&mut self) {
                drop(RESERVED.take());
            }
        }

        RESERVED.set(Some(self));
        let _give_up = GiveUp;
        code()
    }

    /// Waits until all earlier places have been given up. Fails if the call whose turn it is does not begin within `limit`.
    pub(super) fn wait(
        &self,
        limit: Duration,
        fault: impl Fn() -> Option<DdpError>,
    ) -> Result<(), Obstacle> {
        let mut turns = self.queue.turns();
        let (mut ahead, mut since) = (turns.served, Instant::now());
        while turns.served != self.number {
            if let Some(fault) = fault() {
                return Err(Obstacle::Fault(fault));
            }
            if turns.begun || turns.served != ahead {
                (ahead, since) = (turns.served, Instant::now());
            }
            if since.elapsed() >= limit {
                return Err(Obstacle::NotBegun);
            }
            let waited = self.queue.changed.wait_timeout(turns, LOOK.min(limit));
            turns = waited.expect("no panic under lock").0;
        }
        turns.begun = true;
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut turns = self.queue.turns();
        turns.given_up.insert(self.number);
        loop {
            let served = turns.served;
            if !turns.given_up.remove(&served) {
                break;
            }
            turns.served += 1;
            turns.begun = false;
        }
        self.queue.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const LONG: Duration = Duration::from_secs(60);

    fn no_fault() -> Option<DdpError> {
        None
    }

    #[test]
    fn turns_come_in_order_and_places_may_be_given_up() {
        let order = Order::default();
        let done = Mutex::new(Vec::new());
        let places: Vec<(usize, Place)> = (0..6).map(|number| (number, order.take())).collect();
        thread::scope(|scope| {
            for (number, place) in places.into_iter().rev() {
                if number % 3 == 1 {
                    drop(place);
                    continue;
                }
                let done = &done;
                scope.spawn(move || {
                    place.wait(LONG, no_fault).unwrap();
                    thread::sleep(Duration::from_millis(5));
                    done.lock().unwrap().push(number);
                });
            }
        });
        assert_eq!(done.into_inner().unwrap(), [0, 2, 3, 5]);
    }

    #[test]
    fn a_reserved_place_is_taken_once() {
        let order = Order::default();
        let (first, second) = (order.take(), order.take());
        assert_eq!(second.number, 1);
        let numbers = first.reserve_for(|| [order.take().number, order.take().number]);
        assert_eq!(numbers, [0, 2]);
        // A reserved place that is not used is given up.
        second.reserve_for(|| ());
        order.take().wait(LONG, no_fault).unwrap();
    }

    #[test]
    fn a_fault_ends_the_wait_out_of_turn() {
        let order = Order::default();
        let (_first, second) = (order.take(), order.take());
        let died = || Some(DdpError::RankDied { rank: 3 });
        let obstacle = second.wait(LONG, died);
        assert!(matches!(
            obstacle,
            Err(Obstacle::Fault(DdpError::RankDied { rank: 3 }))
        ));
    }

    /// A call that has begun is waited for as long as it takes.
    #[test]
    fn a_call_that_does_not_begin_is_not_waited_for() {
        let order = Order::default();
        let (first, second) = (order.take(), order.take());
        let short = Duration::from_millis(20);
        assert!(matches!(
            second.wait(short, no_fault),
            Err(Obstacle::NotBegun)
        ));
        first.wait(LONG, no_fault).unwrap();
        thread::scope(|scope| {
            let second = scope.spawn(|| second.wait(short, no_fault));
            thread::sleep(10 * short);
            drop(first);
            second.join().unwrap().unwrap();
        });
    }
}
