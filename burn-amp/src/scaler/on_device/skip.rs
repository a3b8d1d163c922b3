//! [`Skip`]: whether a gradient says to skip its step.

use burn::tensor::{Bool, Tensor};

/// One element, which is true if the gradient is NaN. `None` for a gradient without elements, which changes nothing.
pub(super) struct Skip(Option<Tensor<1, Bool>>);

impl Skip {
    /// Looks at `grad`'s first element only, because either all elements are NaN or none is.
    pub(super) fn of<const D: usize>(grad: &Tensor<D>) -> Self {
        let first: [_; D] = core::array::from_fn(|_| 0..1);
        let is_empty = grad.shape().num_elements() == 0;
        Self((!is_empty).then(|| grad.clone().slice(first).reshape([1]).is_nan()))
    }

    /// `old` if the step is skipped, `new` if it is taken.
    pub(super) fn keep<const D: usize>(&self, new: Tensor<D>, old: Tensor<D>) -> Tensor<D> {
        let Some(skip) = &self.0 else { return new };
        let skip = skip.clone().reshape([1; D]).expand(new.shape());
        new.mask_where(skip, old)
    }
}
