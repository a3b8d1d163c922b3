//! [`Skip`]: whether a gradient says that its step is to be skipped.

use burn::tensor::{Bool, Tensor};

/// One element: true where the gradient is NaN.
pub(super) struct Skip(Tensor<1, Bool>);

impl Skip {
    /// What `grad`'s first element says; the others are the same.
    pub(super) fn of<const D: usize>(grad: &Tensor<D>) -> Self {
        let first: [_; D] = core::array::from_fn(|_| 0..1);
        Self(grad.clone().slice(first).reshape([1]).is_nan())
    }

    /// `old` where the step is skipped, `new` where it is taken.
    pub(super) fn keep<const D: usize>(&self, new: Tensor<D>, old: Tensor<D>) -> Tensor<D> {
        let skip = self.0.clone().reshape([1; D]).expand(new.shape());
        new.mask_where(skip, old)
    }
}
