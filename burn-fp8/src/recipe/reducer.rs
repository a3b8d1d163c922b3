//! Sharing amaxes between the ranks of a data-parallel run.

use core::error::Error;
use core::fmt::Debug;

use burn::tensor::Tensor;

/// Takes the maximum of amaxes over the ranks of a process group, so that every rank computes the same scales.
///
/// A layer calls it once per training step with the amaxes of its input, weight and gradient, on every rank in the same
/// order. Without it the ranks quantize the same weight differently and drift apart.
pub trait AmaxReducer: Debug + Send + Sync {
    /// The element-wise maximum of `amaxes` over all ranks, of the same shape and on the same device.
    ///
    /// # Errors
    /// Whatever keeps the group from answering. A module's `forward` panics with it, since it cannot return it.
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>>;
}
