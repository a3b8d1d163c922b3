//! Sharing amaxes between the ranks of a data-parallel run.

use core::error::Error;
use core::fmt::Debug;

use burn::tensor::Tensor;

/// Takes the maximum of amaxes over the ranks of a process group, so that every rank computes the same scales.
///
/// Without it every rank scales inputs and gradients by the amaxes of its own part of the batch: the ranks round
/// differently from one another, and from one process with all of the batch. (Equal weights have equal scales anyway.)
///
/// A layer calls it once in every training pass, whether the pass has rows or not. What the ranks pass at a time
/// belongs together, so every rank runs the same layers in the same order and under the same scopes: a rank that
/// leaves a layer out, or runs it without fp8, lets its next call meet another layer's.
/// [`share_amaxes`](crate::share_amaxes) asks no such thing: it calls once a step, for all layers of a model.
pub trait AmaxReducer: Debug + Send + Sync {
    /// The element-wise maximum of `amaxes` over all ranks, of the same shape and on the same device. All ranks must get
    /// the same; whether a NaN of one rank wins is the implementation's to say.
    ///
    /// # Errors
    /// Whatever keeps the group from answering. A module's `forward` panics with it, since it cannot return it.
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>>;
}
