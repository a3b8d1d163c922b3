//! [`Deferred`]: a tensor that is waited for when it is first used.

use core::fmt;
use std::sync::{Arc, OnceLock};

/// A tensor that is not there yet, such as a gradient that is being reduced over the ranks. Its first use
/// waits for it. Clones share the wait and the result.
#[derive(Clone)]
pub(crate) struct Deferred<P>(Arc<DeferredInner<P>>);

struct DeferredInner<P> {
    value: OnceLock<P>,
    wait: Box<dyn Fn() -> P + Send + Sync>,
}

impl<P: Clone> Deferred<P> {
    /// A tensor that `wait` delivers. It is called once, on the thread that first needs the value.
    pub(crate) fn new(wait: impl Fn() -> P + Send + Sync + 'static) -> Self {
        Self(Arc::new(DeferredInner {
            value: OnceLock::new(),
            wait: Box::new(wait),
        }))
    }

    /// The tensor. Waits for it if need be.
    pub(crate) fn wait(&self) -> P {
        self.0.value.get_or_init(|| (self.0.wait)()).clone()
    }
}

impl<P> fmt::Debug for Deferred<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred")
            .field("ready", &self.0.value.get().is_some())
            .finish()
    }
}
