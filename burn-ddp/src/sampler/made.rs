//! Which sampler a loader has that was just made: a `dyn DataLoader` does not say.

use std::{
    cell::RefCell,
    sync::{Arc, Mutex, Weak},
};

use super::DistributedSampler;

/// A sampler that a loader takes its items from.
pub(crate) type SharedSampler = Arc<Mutex<DistributedSampler>>;

thread_local! {
    static LAST: RefCell<Weak<Mutex<DistributedSampler>>> = RefCell::default();
}

/// Notes that this thread has made a loader with a sampler.
pub(super) fn note(sampler: &SharedSampler) {
    LAST.set(Arc::downgrade(sampler));
}

/// What `make` returns, and the sampler of the [`DistributedLoader`](super::DistributedLoader) that it
/// made last, if it made one that still lives.
pub(crate) fn watch<R>(make: impl FnOnce() -> R) -> (R, Option<SharedSampler>) {
    LAST.set(Weak::new());
    let made = make();
    (made, LAST.take().upgrade())
}
