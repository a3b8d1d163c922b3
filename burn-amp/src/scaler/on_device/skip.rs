//! [`Skip`]: whether a gradient says that its step is to be skipped.

use burn::tensor::{Bool, Tensor};

/// One element: true where the gradient is NaN; none of a gradient without elements, which changes nothing.
pub(super) struct Skip(Option<Tensor<1, Bool>>);

impl Skip {
    /// What `grad`'s first element says; the others are the same.
    pub(super) fn of<const D: usize>(grad: &Tensor<D>) -> Self {
        let first: [_; D] = core::array::from_fn(|_| 0..1);
        let is_empty = grad.shape().num_elements() == 0;
        Self((!is_empty).then(|| grad.clone().slice(first).reshape([1]).is_nan()))
    }

    /// `old` where the step is skipped, `new` where it is taken.
    pub(super) fn keep<const D: usize>(&self, new: Tensor<D>, old: Tensor<D>) -> Tensor<D> {
        let Some(skip) = &self.0 else { return new };
        let skip = skip.clone().reshape([1; D]).expand(new.shape());
        new.mask_where(skip, old)
    }
}
