//! No cuBLASLt, in builds without the feature `cuda`.

use std::sync::Arc;

use crate::{Operands, Product, ProductError};

/// cuBLASLt on a device. In builds without the feature `cuda`, no device has it.
pub enum Library {}

impl Library {
    /// Whether the GPU multiplies fp8.
    pub fn has_fp8(&self) -> bool {
        match *self {}
    }

    /// Whether cuBLASLt was asked for a product of this kind before, and had no algorithm for it, or failed.
    pub fn has_refused(&self, _product: &Product) -> bool {
        match *self {}
    }

    /// Enqueues products.
    ///
    /// # Errors
    /// Never: there is no library.
    pub fn submit(
        self: &Arc<Self>,
        _product: &Product,
        _operands: Operands<'_>,
    ) -> Result<(), ProductError> {
        match **self {}
    }
}
