//! Moving averages of vectors, such as the running mean and variance of a batch norm, on a backend that fuses ops.
//!
//! They are not used before the next step. Until then the backend would keep their kernel open, and would find fewer ops to fuse
//! in what follows; and to end it at once would end the kernel of the norm's output, which goes on to the activation. So they are
//! computed, and their kernel ends, before the next op of the network.

use super::{call::Call, kernel_end::alone_in_kernel};
use crate::{LayeredFloat, deferred::Deferred, ends::End, source::Later};
use burn_backend::{DType, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

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

/// A moving average that may not be computed yet.
struct Average<B: BackendIr> {
    terms: Mutex<Option<[FloatTensor<B>; 2]>>,
    sum: OnceLock<FloatTensor<B>>,
    value: OnceLock<FloatTensor<B>>,
}

impl<B: BackendIr> Average<B> {
    fn sum(&self) -> FloatTensor<B> {
        let sum = self.sum.get_or_init(|| {
            let [x, y] = self.terms.lock().take().expect("this is called once");
            B::float_add(x, y)
        });
        sum.clone()
    }

    fn value(&self) -> FloatTensor<B> {
        let value = self.value.get_or_init(|| alone_in_kernel::<B>(self.sum()));
        value.clone()
    }
}

impl<B: BackendIr> End for Average<B> {
    fn compute(&self) {
        self.sum();
    }

    fn end(&self) {
        self.value();
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
        let is_plain = |planned: Option<DType>| planned.is_none_or(|planned| planned == dtype);
        let plain = is_plain(self.plan.compute) && is_plain(self.plan.store);
        let alike = y.storage_dtype() == dtype && y.shape() == x.shape();
        let layer = self.layer();
        if !(alike && plain) || self.plan.own || self.watched || !layer.is_fused() {
            return None;
        }
        let average = Arc::new(Average::<B> {
            terms: Mutex::new(Some([x, y].map(|term| term.clone().into_storage()))),
            sum: OnceLock::new(),
            value: OnceLock::new(),
        });
        layer.ends.later(average.clone());
        let value = Deferred::new(move || average.value());
        let shape = x.shape();
        layer.stored(dtype, x.dtype(), shape.num_elements());
        let tensor = LayeredFloat::later(
            Later::Deferred(value),
            (shape.clone(), dtype),
            x.storage_device(),
            x.dtype(),
            layer,
        );
        Some(self.known(tensor, shape))
    }
}
