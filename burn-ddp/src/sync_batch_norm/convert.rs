//! Converts whole models from `BatchNorm` to [`SyncBatchNorm`].

use burn::{module::Module, nn::BatchNorm, tensor::Tensor};

use super::SyncBatchNorm;
use crate::ProcessGroup;

/// A batch norm, synchronized or not. A model that is to be [converted](ToSyncBatchNorm) is generic over it.
pub trait Norm: Module {
    /// Normalizes the input, of shape `[batch, channels, ...]`; the output has the same shape.
    fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D>;
}

impl Norm for BatchNorm {
    fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        self.forward(input)
    }
}

impl Norm for SyncBatchNorm {
    fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        self.forward(input)
    }
}

/// A model in which each [`BatchNorm`] can be replaced by a [`SyncBatchNorm`], like PyTorch's `convert_sync_batchnorm`.
///
/// Burn's modules are types, so a converted model has a different type: the model is generic over its [`Norm`],
/// and [`to_sync_batch_norm!`](crate::to_sync_batch_norm) lists which of its fields contain one. Parameters,
/// running statistics and their ids are kept, and records fit both.
///
/// ```
/// use burn::{
///     module::Module,
///     nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
///     tensor::{Device, Tensor},
/// };
/// use burn_ddp::{Norm, ProcessGroup, SyncBatchNorm, ToSyncBatchNorm, to_sync_batch_norm};
///
/// #[derive(Module, Debug)]
/// struct Block<N: Norm> {
///     linear: Linear,
///     norm: N,
/// }
///
/// impl<N: Norm> Block<N> {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.norm.forward(self.linear.forward(x))
///     }
/// }
///
/// to_sync_batch_norm!(Block { convert: norm; keep: linear });
///
/// #[derive(Module, Debug)]
/// struct Net<N: Norm> {
///     blocks: Vec<Block<N>>,
/// }
///
/// to_sync_batch_norm!(Net { convert: blocks; keep: });
///
/// let device = Device::flex();
/// let block = || Block {
///     linear: LinearConfig::new(4, 4).init(&device),
///     norm: BatchNormConfig::new(4).init(&device),
/// };
/// let net: Net<BatchNorm> = Net { blocks: vec![block(), block()] };
/// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?.duplicate()?
/// let net: Net<SyncBatchNorm> = net.to_sync_batch_norm(&group);
/// # let _ = net.blocks[0].forward(Tensor::ones([2, 4], &device));
/// ```
pub trait ToSyncBatchNorm {
    /// The converted model.
    type Synchronized;

    /// Converts the model. `group` is passed to [`SyncBatchNorm::new`].
    fn to_sync_batch_norm(self, group: &ProcessGroup) -> Self::Synchronized;
}

impl ToSyncBatchNorm for BatchNorm {
    type Synchronized = SyncBatchNorm;

    fn to_sync_batch_norm(self, group: &ProcessGroup) -> SyncBatchNorm {
        SyncBatchNorm::new(&self, group)
    }
}

impl<T: ToSyncBatchNorm> ToSyncBatchNorm for Option<T> {
    type Synchronized = Option<T::Synchronized>;

    fn to_sync_batch_norm(self, group: &ProcessGroup) -> Self::Synchronized {
        self.map(|it| it.to_sync_batch_norm(group))
    }
}

impl<T: ToSyncBatchNorm> ToSyncBatchNorm for Vec<T> {
    type Synchronized = Vec<T::Synchronized>;

    fn to_sync_batch_norm(self, group: &ProcessGroup) -> Self::Synchronized {
        let converted = self.into_iter().map(|it| it.to_sync_batch_norm(group));
        converted.collect()
    }
}

impl<T: ToSyncBatchNorm, const N: usize> ToSyncBatchNorm for [T; N] {
    type Synchronized = [T::Synchronized; N];

    fn to_sync_batch_norm(self, group: &ProcessGroup) -> Self::Synchronized {
        self.map(|it| it.to_sync_batch_norm(group))
    }
}

/// Implements [`ToSyncBatchNorm`] for a struct that is generic over its [`Norm`] and over nothing else:
/// `to_sync_batch_norm!(Block { convert: norm, inner; keep: conv })`. All fields must be listed. See
/// [`ToSyncBatchNorm`] for an example.
#[macro_export]
macro_rules! to_sync_batch_norm {
    ($model:ident { convert: $($converted:ident),* $(,)?; keep: $($kept:ident),* $(,)? }) => {
        impl $crate::ToSyncBatchNorm for $model<$crate::BatchNorm> {
            type Synchronized = $model<$crate::SyncBatchNorm>;

            fn to_sync_batch_norm(self, group: &$crate::ProcessGroup) -> Self::Synchronized {
                $model {
                    $($converted: $crate::ToSyncBatchNorm::to_sync_batch_norm(
                        self.$converted,
                        group,
                    ),)*
                    $($kept: self.$kept,)*
                }
            }
        }
    };
}
