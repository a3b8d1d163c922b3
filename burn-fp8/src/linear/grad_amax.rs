//! The slot in which backward leaves the amax of a gradient.

use core::any::Any;
use std::sync::Arc;

use burn::backend::{Backend, tensor::FloatTensor};
use parking_lot::Mutex;

use crate::Fp8Ops;

/// Carries the amax of a gradient from the backward pass, which computes it, to the next forward pass, which puts it into the
/// history. Clones share the slot.
#[derive(Clone, Debug, Default)]
pub struct GradAmaxSlot(Arc<Mutex<Option<Arc<dyn Any + Send + Sync>>>>);

impl GradAmaxSlot {
    /// Leaves an amax of shape `[1]`. If there is one already (the layer ran twice), the larger one stays, or NaN if one is NaN.
    pub(crate) fn put<B: Backend + Fp8Ops>(&self, amax: FloatTensor<B>) {
        // Locked until the end, because another thread's backward may leave an amax too.
        let mut slot = self.0.lock();
        let other = slot
            .as_ref()
            .and_then(|it| it.downcast_ref::<FloatTensor<B>>());
        let amax = match other.cloned() {
            Some(other) => B::fp8_amax(B::float_cat(vec![other, amax], 0)),
            None => amax,
        };
        *slot = Some(Arc::new(amax));
    }

    /// Empties the slot. Returns the amax, if there is one and it is of type `T`.
    pub(crate) fn take<T: Clone + 'static>(&self) -> Option<T> {
        self.0.lock().take()?.downcast_ref::<T>().cloned()
    }

    /// Whether an amax is waiting.
    pub(crate) fn is_set(&self) -> bool {
        self.0.lock().is_some()
    }

    /// A separate slot with the same amax.
    pub(crate) fn deep_clone(&self) -> Self {
        Self(Arc::new(Mutex::new(self.0.lock().clone())))
    }
}
