#![doc = include_str!("../README.md")]

mod call;
mod checkpoint;
mod collective;
mod ddp;
mod element;
mod environment;
mod error;
mod group;
pub mod launch;
mod local;
mod sampler;
mod sync_batch_norm;
mod tcp;
mod transport;

pub use call::{Call, CallKind};
pub use checkpoint::{Best, Checkpoint, Checkpoints};
pub use ddp::{
    Average, BucketSizes, BucketTimes, Bucketer, CommHook, Compression, Ddp, DdpConfig, DdpStats,
    GradientBucket, Overlap, OverlapLayer, Slot, Timeline, Values,
};
pub use element::{Element, ElementType, ReduceOp};
pub use error::DdpError;
pub use group::{GroupBuilder, GroupStats, Pending, ProcessGroup, is_distributed_env};
pub use local::LocalGroup;
pub use sampler::DistributedSampler;
pub use sync_batch_norm::{
    SyncBatchNorm, SyncBatchNormOps, custom_ops, register_custom_ops, with_custom_ops,
};
