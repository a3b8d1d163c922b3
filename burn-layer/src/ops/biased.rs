//! The product of a linear layer and its bias, on a backend that fuses ops.
//!
//! Burn computes the product, reshapes the bias to a row, and adds it. The row is a view, and no kernel goes on from the product past
//! it, so that the product is written, read, and written once more with the bias. Here a product waits until it is needed. If the sum
//! needs it, the row comes before the product, and both are one kernel.

use super::{call::Call, product::product};
use crate::{LayeredFloat, deferred::Deferred, source::Later};
use burn_backend::TensorMetadata;
use burn_ir::BackendIr;
use std::sync::Arc;

/// Has products wait, and adds biases to them.
macro_rules! biased {
    ($call:ident, float_matmul, $x:ident: Float, $y:ident: Float) => {
        if let Some(tensor) = $call.multiplies_later(&$x, &$y) {
            return tensor;
        }
    };
    ($call:ident, float_add, $x:ident: Float, $y:ident: Float) => {
        if $call.adds_bias(&$x) {
            let row = $call.lower($y);
            let product = $call.lower($x);
            $call.lowered();
            return $call.float(B::float_add(product, row));
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use biased;

impl<B: BackendIr> Call<B> {
    /// The product with a factor that no network computed, such as a weight. It waits.
    pub(super) fn multiplies_later(
        &mut self,
        x: &LayeredFloat<B>,
        y: &LayeredFloat<B>,
    ) -> Option<LayeredFloat<B>> {
        let inputs = self.inputs.as_ref()?;
        if inputs.first_is_gradient || inputs.last_is_gradient || inputs.last_is_computed {
            return None;
        }
        let plain = self.plan.store.is_none() || self.plan.store == self.plan.compute;
        let waits = plain && !self.plan.own && !self.watched && self.layer().is_fused();
        let mut shape = x.shape();
        let rows = shape.num_dims().checked_sub(2)?;
        if !waits || y.shape()[..rows] != shape[..rows] {
            return None;
        }
        shape.as_mut_slice()[rows + 1] = y.shape()[rows + 1];
        let factors = x.shape().num_elements() + y.shape().num_elements();
        let small = shape.num_elements() < factors;
        let transposed = inputs.first_transposed;
        let factors = [x, y].map(|factor| self.lower(factor.clone()));
        self.lowered();
        let dtype = factors[0].dtype();
        let layers = self.layer();
        let product = Deferred::new(move || {
            let [x, y] = factors;
            product::<B>(&layers, x, y, transposed, |product| product)
        });
        let due = Arc::new(product.due());
        match small {
            // Those that a program collects, such as the logits of its batches, would hold the activations and weights that they are of.
            true => self.layer().ends.later(due),
            false => self.layer().pending.later(due),
        }
        Some(self.waiting(Later::Deferred(product), x, (shape, dtype)))
    }

    /// Whether the op adds a bias to the product `x`, which waits.
    pub(super) fn adds_bias(&self, x: &LayeredFloat<B>) -> bool {
        let biased = self.inputs.as_ref().is_some_and(|inputs| inputs.biased);
        biased && x.waits()
    }
}
