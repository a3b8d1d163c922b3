//! The operation as an extension of Burn's backends.

use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

use super::compute;
use crate::ProcessGroup;

/// Three tensors of a backend.
pub(super) type Three<B> = (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>);

/// Synchronized batch normalization, as [`SyncBatchNorm`](super::SyncBatchNorm) calls it.
///
/// A backend implements it with an empty `impl` block: the default bodies use Burn's standard operations.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu")),
    Remote,
    Autodiff
)]
pub(super) trait SyncBatchNormOps: Backend {
    /// Normalizes `x`, of shape `[batch, channels, ...]`, by the mean and variance over the batches of
    /// all ranks of the group; gamma and beta have shape `[channels]`.
    ///
    /// Returns the output, with the shape and type of `x`, and the mean and the biased variance, of shape
    /// `[channels]`, in `f32` or wider. A variance of -1 means that no rank had samples.
    fn sync_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        group: ProcessGroup,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        compute::forward::<Self>(x, gamma, beta, &group, epsilon)
    }

    /// The gradient of `x`, with the statistics over all ranks' batches, and this rank's share of the gradients of
    /// gamma and beta, given the gradient of the output. `mean` and `variance` are the results of the forward pass.
    fn sync_batch_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        group: ProcessGroup,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        compute::backward::<Self>(x, gamma, mean, variance, grad, &group, epsilon)
    }
}

#[cfg(feature = "flex")]
impl SyncBatchNormOps for burn::backend::Flex {}

#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
impl SyncBatchNormOps for burn::backend::Cube {}
