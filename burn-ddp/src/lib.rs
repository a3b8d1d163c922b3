#![doc = include_str!("../README.md")]

mod backend;
mod call;
mod checkpoint;
mod clip;
mod collective;
mod ddp;
mod element;
mod ema;
mod environment;
mod error;
mod flaw;
#[cfg(feature = "fp8")]
mod fp8;
mod group;
pub mod launch;
mod learning_rate;
mod local;
#[cfg(any(test, feature = "nccl"))]
mod nccl;
mod sampler;
pub mod simulate;
mod sync_batch_norm;
mod tcp;
#[cfg(feature = "train")]
mod train;
mod transport;
mod widen;

pub use backend::{Backend, NcclError, NcclVersion};
/// Burn's, which [`to_sync_batch_norm!`] names.
#[doc(no_inline)]
pub use burn::nn::BatchNorm;
pub use call::{Call, CallKind};
pub use checkpoint::{Best, Checkpoint, Checkpoints};
pub use clip::clip_gradient_norm;
pub use ddp::{
    Average, BucketSizes, BucketTimes, Bucketer, CommHook, Compression, Ddp, DdpConfig, DdpStats,
    GradientBucket, Overlap, OverlapLayer, Slot, Timeline, Values,
};
pub use element::{Element, ElementType, ReduceOp};
pub use ema::ModelEma;
pub use error::DdpError;
pub use flaw::Flaw;
pub use group::{GroupBuilder, GroupStats, Pending, ProcessGroup, TensorOp, is_distributed_env};
pub use learning_rate::{LrScaling, scale_lr};
pub use local::LocalGroup;
pub use sampler::{DistributedLoader, DistributedSampler, SamplerState};
pub use sync_batch_norm::{
    Norm, SyncBatchNorm, SyncBatchNormOps, ToSyncBatchNorm, custom_ops, register_custom_ops,
    with_custom_ops,
};
#[cfg(feature = "train")]
pub use train::{AtomicCheckpointer, DdpStrategy, EpochCheckpoints, GatherOutput};
