//! Where backward leaves the amax of a gradient.

use core::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::{Backend, tensor::FloatTensor};

use crate::portable;

/// Carries the amax of a gradient from the backward pass, where it is first known, to the next forward pass, which puts
/// it into the history. Clones are the same slot.
#[derive(Clone, Debug, Default)]
pub struct GradAmaxSlot(Arc<Mutex<Option<Arc<dyn Any + Send + Sync>>>>);

impl GradAmaxSlot {
    /// Leave an amax of shape `[1]`. One that is there already (the layer ran twice) is combined with it.
    pub(crate) fn put<B: Backend>(&self, amax: FloatTensor<B>) {
        // Locked all the while: another thread's backward may leave one too.
        let mut slot = self.lock();
        let other = slot
            .as_ref()
            .and_then(|it| it.downcast_ref::<FloatTensor<B>>());
        let amax = match other.cloned() {
            Some(other) => portable::nan_max::<B>(B::float_cat(vec![other, amax], 0)),
            None => amax,
        };
        *slot = Some(Arc::new(amax));
    }

    /// The amax, if there is one and it is of type `T`.
    pub(crate) fn get<T: Clone + 'static>(&self, take: bool) -> Option<T> {
        let mut slot = self.lock();
        let amax = slot.as_ref()?.downcast_ref::<T>().cloned();
        if take {
            *slot = None;
        }
        amax
    }

    /// Whether an amax is waiting.
    pub(crate) fn is_set(&self) -> bool {
        self.lock().is_some()
    }

    /// A slot of its own with the same amax.
    pub(crate) fn deep_clone(&self) -> Self {
        Self(Arc::new(Mutex::new(self.lock().clone())))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<dyn Any + Send + Sync>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
