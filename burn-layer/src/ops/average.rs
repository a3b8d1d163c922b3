//! Moving averages of vectors, such as the running mean and variance of a batch norm, on a backend that fuses ops.
//!
//! They are not used before the next step. Until then the backend would keep their kernel open, and would find fewer ops to fuse
//! in what follows; and to end it at once would end the kernel of the norm's output, which goes on to the activation. So they are
//! computed, and their kernel ends, before the next op of the network.

use super::{call::Call, kernel_end::alone_in_kernel};
use crate::{
    LayeredFloat,
    deferred::{Deferred, Due},
    ends::End,
    source::Later,
};
use burn_backend::TensorMetadata;
use burn_ir::BackendIr;
use std::sync::Arc;

/// Has a moving average computed later.
macro_rules! average {
    ($call:ident, float_add, $x:ident: Float, $y:ident: Float) => {
        if let Some(tensor) = $call.averages(&$x, &$y) {
            return tensor;
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use average;

/// A moving average that may not be computed yet, if it is still there.
struct Average<P> {
    sum: Due<P>,
    /// The sum, at the end of its kernel.
    value: Due<P>,
}

impl<P: Clone + Send + Sync> End for Average<P> {
    fn compute(&self) {
        self.sum.compute();
    }

    fn end(&self) {
        self.value.compute();
    }
}

impl<B: BackendIr> Call<B> {
    /// The sum of two vectors that were multiplied by numbers, neither of them a gradient.
    pub(super) fn averages(
        &mut self,
        x: &LayeredFloat<B>,
        y: &LayeredFloat<B>,
    ) -> Option<LayeredFloat<B>> {
        let inputs = self.inputs.as_ref()?;
        if !inputs.averages || inputs.first_is_gradient || inputs.last_is_gradient {
            return None;
        }
        let dtype = x.storage_dtype();
        let alike = y.storage_dtype() == dtype && y.shape() == x.shape();
        let layer = self.layer();
        if !(alike && self.is_plain(dtype) && layer.is_fused()) {
            return None;
        }
        let [first, last] = [x, y].map(|term| term.clone().into_storage());
        let sum = Deferred::new(move || B::float_add(first, last));
        let (due, of) = (sum.due(), sum);
        let value = Deferred::new(move || alone_in_kernel::<B>(of.wait()));
        layer.ends.later(Arc::new(Average {
            sum: due,
            value: value.due(),
        }));
        Some(self.waiting(Later::Deferred(value), x, (x.shape(), dtype)))
    }
}
