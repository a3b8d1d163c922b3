//! [`Unchecked`]: the warning about gradients that a step left out.

use super::gradients::Pass;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// Whether a scaler has warned about gradients that do not belong to its module. Shared with its clones, which do not warn again.
#[derive(Clone, Debug, Default)]
pub(super) struct Unchecked(Arc<AtomicBool>);

impl Unchecked {
    /// Warns, once, if gradients belong to parameters that the module they were unscaled with does not have, or if there are
    /// none.
    pub(super) fn warn_of(&self, pass: &Pass) {
        let left_out = pass.left_out();
        if (left_out == 0 && !pass.is_empty()) || self.0.swap(true, Relaxed) {
            return;
        }
        if pass.is_empty() {
            log::warn!(
                "the module has none of the {left_out} gradients that it is to be stepped with: nothing is checked for \
                 overflow, no parameter changes and the loss scale stays as it is. Take the gradients of this \
                 module, after backward: GradientsParams::from_grads(grads, &module)"
            );
        } else {
            log::warn!(
                "{left_out} gradients are of parameters that the module which they are unscaled with does not have: they \
                 are left out. Unscale the gradients of a whole model with the whole model, or take those of a part, after \
                 backward: GradientsParams::from_module(&mut grads, &part)"
            );
        }
    }
}
