//! Sharing amaxes between the ranks of a data-parallel run.

use core::error::Error;
use core::fmt::Debug;

use burn::tensor::Tensor;

/// Takes the maximum of amaxes over the ranks of a process group, so that every rank computes the same scales.
///
/// Without it, every rank scales inputs and gradients by the amaxes of its own part of the batch. So the ranks round differently
/// from each other, and from one process with the whole batch. (Equal weights have equal scales anyway.)
///
/// A layer calls it once in every training pass, even if the pass has no rows. The ranks' calls are matched by their order. So
/// every rank must run the same layers in the same order and under the same scopes: if a rank skips a layer, or runs it without
/// fp8, its next call meets another layer's. [`share_amaxes`](crate::share_amaxes) does not require this, because it makes one
/// call a step for all layers of a model.
pub trait AmaxReducer: Debug + Send + Sync {
    /// The element-wise maximum of `amaxes` over all ranks, in the same shape and on the same device. All ranks must get the same
    /// values. Whether a NaN of one rank wins is up to the implementation.
    ///
    /// # Errors
    /// Any error that keeps the group from answering. A module's `forward` panics with it, because it cannot return it.
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>>;
}
