//! [`Held`]: the layers of a tensor.

use crate::LayerSet;
use core::ops::Deref;
use std::sync::Arc;

/// The layers of a tensor. They are not taken off their device while the tensor lives.
pub(crate) struct Held(Arc<LayerSet>);

impl Held {
    pub(crate) fn new(layer: Arc<LayerSet>) -> Self {
        layer.hold();
        Self(layer)
    }
}

impl Clone for Held {
    fn clone(&self) -> Self {
        Self::new(self.0.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl Deref for Held {
    type Target = Arc<LayerSet>;

    fn deref(&self) -> &Arc<LayerSet> {
        &self.0
    }
}
