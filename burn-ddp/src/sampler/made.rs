//! Tells which sampler a newly created loader uses, because a `dyn DataLoader` does not.

use std::{
    cell::RefCell,
    sync::{Arc, Mutex, Weak},
};

use super::DistributedSampler;

/// The sampler that a loader takes its items from.
pub(crate) type SharedSampler = Arc<Mutex<DistributedSampler>>;

thread_local! {
    static LAST: RefCell<Weak<Mutex<DistributedSampler>>> = RefCell::default();
}

/// Records that this thread has created a loader with this sampler.
pub(super) fn note(sampler: &SharedSampler) {
    LAST.set(Arc::downgrade(sampler));
}

/// What `make` returns, and the sampler of the [`DistributedLoader`](super::DistributedLoader) that it created
/// last from another one (`to_device`, `slice`), if there is one and it is still alive.
pub(crate) fn watch<R>(make: impl FnOnce() -> R) -> (R, Option<SharedSampler>) {
    LAST.set(Weak::new());
    let made = make();
    (made, LAST.take().upgrade())
}
