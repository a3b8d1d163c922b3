//! The edge to NVIDIA's library: all that is unsafe about it is in here.

#[cfg(feature = "nccl")]
mod communicator;
mod functions;
mod library;
#[cfg(feature = "nccl")]
mod source;

#[cfg(feature = "nccl")]
pub(super) use communicator::DeviceCommunicator;
pub(super) use library::{Library, UniqueId};
#[cfg(feature = "nccl")]
pub(crate) use source::{Source, run};
