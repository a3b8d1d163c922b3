#![doc = include_str!("../README.md")]

mod backend;
mod call;
mod checkpoint;
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
mod stall;
mod sync_batch_norm;
mod tcp;
#[cfg(feature = "train")]
mod train;
mod transport;

pub use backend::{Backend, NcclError, NcclVersion};
// Exported for `to_sync_batch_norm!`, which names it.
#[doc(hidden)]
pub use burn::nn::BatchNorm;
pub use burn_layer::{LayerError, Layers, clip_gradient_norm};
pub use call::{Call, CallKind};
pub use checkpoint::{Best, Checkpoint, Checkpoints};
pub use ddp::{
    Average, BucketTimes, CommHook, Compression, Ddp, DdpConfig, DdpStats, GradientBucket, Overlap,
    OverlapLayer, Timeline, Values,
};
pub use element::{Element, ElementType, ReduceOp};
pub use ema::ModelEma;
pub use error::DdpError;
pub use flaw::Flaw;
pub use group::{GroupBuilder, GroupStats, Pending, ProcessGroup, TensorOp, is_distributed_env};
pub use learning_rate::{LrScaling, scale_lr};
pub use local::LocalGroup;
pub use sampler::{DistributedLoader, DistributedSampler, SamplerState};
pub use sync_batch_norm::{Norm, SyncBatchNorm, ToSyncBatchNorm, with_custom_ops};
#[cfg(feature = "train")]
pub use train::{AtomicCheckpointer, DdpStrategy, EpochCheckpoints, GatherOutput};
