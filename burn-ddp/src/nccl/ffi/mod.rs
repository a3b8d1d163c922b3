//! The boundary to NVIDIA's library. All unsafe code for it is in this module.

mod communicator;
mod functions;
mod library;
mod resident;
#[cfg(feature = "nccl")]
mod source;

pub(super) use communicator::DeviceCommunicator;
pub(crate) use communicator::DeviceStream;
#[cfg(test)]
pub(super) use functions::{
    Buffer, Comm, Config, DataType, IN_PROGRESS, MAGIC, MutBuffer, Operator, SUCCESS, VERSION,
};
pub(super) use functions::{Functions, Stream};
pub(super) use library::{Library, UniqueId};
#[cfg(test)]
pub(super) use library::{RawUniqueId, Status};
pub(crate) use resident::{Resident, run};
#[cfg(feature = "nccl")]
pub(crate) use source::{Source, has_driver};
