//! Sums of gradients that were computed in 16 bits, on a backend that fuses ops.
//!
//! Where a tensor was used several times, such as the input of an attention's three products, autodiff adds a gradient as soon as it is
//! computed, and the next product comes between two sums. Here the sum of two that are cast waits until it is needed, by the next sum for
//! instance: casts and sums then come one after the other, and are one kernel. Until then both take no more memory than their sum.

use super::call::Call;
use crate::{LayeredFloat, deferred::Deferred, source::Later};
use burn_backend::{DType, TensorMetadata};
use burn_ir::BackendIr;

/// Has a sum of gradients wait.
macro_rules! gradient_sum {
    ($call:ident, float_add, $x:ident: Float, $y:ident: Float) => {
        if let Some(tensor) = $call.adds_gradients_later(&$x, &$y) {
            return tensor;
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use gradient_sum;

impl<B: BackendIr> Call<B> {
    /// The sum of two gradients that are cast to f32.
    pub(super) fn adds_gradients_later(
        &self,
        x: &LayeredFloat<B>,
        y: &LayeredFloat<B>,
    ) -> Option<LayeredFloat<B>> {
        let terms = [x, y];
        let is_cast = |term: &&LayeredFloat<B>| {
            term.is_gradient() && term.exact().is_some() && term.storage_dtype() == DType::F32
        };
        let cast = terms.iter().all(is_cast);
        if !cast || x.shape() != y.shape() || !self.is_plain(DType::F32) {
            return None;
        }
        let terms = terms.map(Clone::clone);
        let sum = Deferred::new(move || {
            let [x, y] = terms.map(LayeredFloat::into_storage);
            B::float_add(x, y)
        });
        Some(self.waiting(Later::Deferred(sum), x, (x.shape(), DType::F32)))
    }
}
