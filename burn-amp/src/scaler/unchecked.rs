//! [`Unchecked`]: a step that nothing was checked for.

use burn::optim::GradientsParams;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// Whether a scaler has warned of a module without gradients; its clones need not warn again.
#[derive(Clone, Debug, Default)]
pub(super) struct Unchecked(Arc<AtomicBool>);

impl Unchecked {
    /// Warns, once, that none of `grads` belongs to the module that they were unscaled with.
    pub(super) fn warn(&self, grads: &GradientsParams) {
        if !self.0.swap(true, Relaxed) {
            log::warn!(
                "the module has none of the {} gradients that it is to be stepped with: nothing is checked for \
                 overflow, no parameter changes and the loss scale stays as it is. Take the gradients of this \
                 module, after backward: GradientsParams::from_grads(grads, &module)",
                grads.len()
            );
        }
    }
}
