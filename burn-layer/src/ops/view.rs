//! Views that are taken when they are needed, on a backend that fuses ops.
//!
//! Burn's linear layer makes a matrix of its input before the product, and its backward one of the gradient. Both are often in f32,
//! from a norm or a residual sum, and the product takes them in 16 bits. Cast before it is viewed, such a tensor is cast in the
//! kernel that computes it, and is not written in f32 if nothing else needs it.
//!
//! A gradient in f32 that a product computed in 16 bits is viewed as it was computed, and cast where it is needed in f32.

use super::call::Call;
use crate::{LayeredFloat, Op, source::Later, view::View};
use burn_backend::{DType, Shape, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use std::sync::Arc;

/// Has a view taken later.
macro_rules! view {
    ($call:ident, float_reshape, $x:ident: Float, $shape:ident: [Shape]) => {
        view!(@ $call.views_exact(&$x, |x| B::float_reshape(x, $shape.clone())));
        view!(@ $call.reshapes_later(&$x, &$shape))
    };
    ($call:ident, float_swap_dims, $x:ident: Float, $a:ident: [usize], $b:ident: [usize]) => {
        view!(@ $call.views_exact(&$x, |x| B::float_swap_dims(x, $a, $b)))
    };
    ($call:ident, float_transpose, $x:ident: Float) => {
        view!(@ $call.views_exact(&$x, B::float_transpose))
    };
    ($call:ident, float_permute, $x:ident: Float, $axes:ident: [&[usize]]) => {
        view!(@ $call.views_exact(&$x, |x| B::float_permute(x, $axes)))
    };
    (@ $tensor:expr) => {
        if let Some(tensor) = $tensor {
            return tensor;
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use view;

impl<B: BackendIr> Call<B> {
    /// The view of a tensor that was computed in a narrower dtype, taken in that.
    pub(super) fn views_exact(
        &self,
        x: &LayeredFloat<B>,
        view: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
    ) -> Option<LayeredFloat<B>> {
        let exact = x.exact()?.clone();
        let dtype = x.storage_dtype();
        self.is_plain(dtype)
            .then(|| self.widened(view(exact), x.dtype(), dtype))
    }

    /// The tensor in another shape, if it may be needed in 16 bits.
    pub(super) fn reshapes_later(
        &self,
        x: &LayeredFloat<B>,
        shape: &Shape,
    ) -> Option<LayeredFloat<B>> {
        let dtype = x.storage_dtype();
        let of_network = x.is_computed() || x.is_gradient();
        // A matrix of the same rows.
        let before = x.shape();
        let to_matrix =
            shape.num_dims() == 2 && before.num_dims() > 2 && shape.last() == before.last();
        // A sum of gradients is computed now.
        let is_there = x.is_ready() || x.is_gradient() && x.waits();
        let waits = is_there && of_network && dtype == DType::F32 && to_matrix;
        let layer = self.layer();
        if !(waits && self.is_plain(dtype) && layer.is_fused() && layer.low().is_some()) {
            return None;
        }
        let form = shape.clone();
        let view = View::new(x.clone().into_storage(), move |tensor| {
            B::float_reshape(tensor, form.clone())
        });
        Some(self.waiting(Later::View(Arc::new(view)), x, (shape.clone(), dtype)))
    }

    /// Casts the gradient of a linear layer's output before it is viewed, when the gradient of the bias is about to be summed from
    /// the view. That comes before the products that take the gradient in 16 bits.
    pub(super) fn casts_viewed(&self, tensor: &LayeredFloat<B>) {
        if self.op == Op::float_sum_dim
            && tensor.is_view()
            && tensor.is_gradient()
            && !self.layer().owns()
            && let Some(low) = self.layer().low()
        {
            tensor.clone().into_dtype(low);
        }
    }
}
