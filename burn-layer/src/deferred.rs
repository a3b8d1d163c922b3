//! [`Deferred`]: a tensor that is waited for when it is first used.

use crate::ends::End;
use core::fmt;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock, Weak};

/// A tensor that is not there yet, such as a gradient that is being reduced over the ranks. Its first use
/// waits for it. Clones share the wait and the result.
#[derive(Clone)]
pub(crate) struct Deferred<P>(Arc<DeferredInner<P>>);

struct DeferredInner<P> {
    value: OnceLock<P>,
    wait: Mutex<Option<Box<dyn FnOnce() -> P + Send>>>,
}

impl<P: Clone> Deferred<P> {
    /// A tensor that `wait` delivers. It is called once, on the thread that first needs the value.
    pub(crate) fn new(wait: impl FnOnce() -> P + Send + 'static) -> Self {
        Self(Arc::new(DeferredInner {
            value: OnceLock::new(),
            wait: Mutex::new(Some(Box::new(wait))),
        }))
    }

    /// Something that computes the tensor, if it is still there and nobody did so before.
    pub(crate) fn due(&self) -> Due<P> {
        Due(Arc::downgrade(&self.0))
    }

    /// The tensor. Waits for it if need be.
    pub(crate) fn wait(&self) -> P {
        let value = self.0.value.get_or_init(|| {
            let wait = self.0.wait.lock().take();
            wait.expect("it is called once, unless it panicked")()
        });
        value.clone()
    }
}

/// A tensor that is computed, at the latest, before the next op of a network.
pub(crate) struct Due<P>(Weak<DeferredInner<P>>);

impl<P: Clone + Send + Sync> End for Due<P> {
    fn compute(&self) {
        if let Some(tensor) = self.0.upgrade() {
            Deferred(tensor).wait();
        }
    }

    fn end(&self) {}
}

impl<P> fmt::Debug for Deferred<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred")
            .field("ready", &self.0.value.get().is_some())
            .finish()
    }
}
