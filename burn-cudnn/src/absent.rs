//! No cuDNN, in builds without the feature `cuda`.

use std::sync::Arc;

use crate::{Convolution, ConvolutionError, Operands};

/// cuDNN on a device. In builds without the feature `cuda`, no device has it.
pub enum Library {}

impl Library {
    /// Whether cuDNN has a plan for a convolution.
    ///
    /// # Errors
    /// Never: there is no library.
    pub fn prepare(&self, _convolution: &Convolution) -> Result<(), ConvolutionError> {
        match *self {}
    }

    /// Enqueues a convolution.
    ///
    /// # Errors
    /// Never: there is no library.
    pub fn submit(
        self: &Arc<Self>,
        _convolution: &Convolution,
        _operands: Operands<'_>,
    ) -> Result<(), ConvolutionError> {
        match **self {}
    }
}
