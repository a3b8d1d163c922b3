//! Why a rank cannot use NCCL.

use serde::{Deserialize, Serialize};

use super::{NcclVersion, version::SHARING};

/// Why a rank cannot use NCCL, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum NcclError {
    /// The rank asks for [`Backend::Host`](crate::Backend::Host).
    #[error("it asks for the backend `host`")]
    NotAsked,
    /// The program was built without NCCL support.
    #[error("the program was built without it; enable the feature `nccl` or `cuda` of burn-ddp")]
    NotCompiledIn,
    /// The tensors are not on a CUDA device.
    #[error(
        "its tensors are on {device}; NCCL moves tensors of CUDA devices only (on a layered device, the gradients of \
         `Ddp::overlapped`)"
    )]
    NotOnCuda {
        /// The device.
        device: String,
    },
    /// No NCCL library was found.
    #[error(
        "no NCCL library was found (looked for {}); install it (NVIDIA's package libnccl2, or \
         `pip install nvidia-nccl-cu13`), or set BURN_DDP_NCCL to the path of libnccl.so.2",
        searched.join(", ")
    )]
    NotFound {
        /// The places that were searched.
        searched: Vec<String>,
    },
    /// A library was found, but does not work.
    #[error(
        "{library} does not work: {problem}; install another, or set BURN_DDP_NCCL to its path"
    )]
    NotUsable {
        /// The library's file.
        library: String,
        /// The error message of the loader or of NCCL.
        problem: String,
    },
    /// The library is too old.
    #[error(
        "{library} is NCCL {version}; install version {oldest} or newer, or set BURN_DDP_NCCL to the path of one"
    )]
    TooOld {
        /// The library's file.
        library: String,
        /// Its version.
        version: NcclVersion,
        /// The oldest version that is supported.
        oldest: NcclVersion,
    },
    /// Rank 0 has another version.
    #[error(
        "it has NCCL {version} and rank 0 has {expected}; install the same version on all machines"
    )]
    OtherVersion {
        /// The rank's version.
        version: NcclVersion,
        /// Rank 0's version.
        expected: NcclVersion,
    },
    /// Another rank is on the same GPU.
    #[error(
        "it is on the same GPU as rank {other} ({gpu}); give each rank a GPU of its own \
         (`group.local_device(DeviceType::Cuda)`), or, with NCCL {SHARING} or newer, set \
         NCCL_MULTI_RANK_GPU_ENABLE=1"
    )]
    SharedGpu {
        /// The other rank.
        other: usize,
        /// The GPU.
        gpu: String,
    },
    /// The CUDA driver is missing, or returned an error.
    #[error("the CUDA driver says: {problem}")]
    Driver {
        /// What is wrong.
        problem: String,
    },
}
