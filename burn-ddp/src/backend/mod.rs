//! How tensors travel between ranks: from GPU to GPU by NCCL, or by way of the host.

mod error;
mod offer;
mod version;

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use strum::{Display, VariantArray};

pub(crate) use self::offer::{Choice, Gpu, Offer, choose};
pub use self::{error::NcclError, version::NcclVersion};

/// How a group moves tensors. The group's own connections (TCP, or memory shared by threads) always carry
/// everything else: rendezvous, checks, slices of host memory, faults.
///
/// All ranks must ask for the same backend. This is PyTorch's `backend` argument: `"nccl"` is [`Nccl`](Self::Nccl),
/// `"gloo"` is [`Host`](Self::Host).
///
/// With NCCL:
///
/// - **Faults.** The group's own connections stay the control plane: they compare each call, and the shapes of its tensors, before NCCL
///   is entered, and report a dead rank at once. Every call keeps the time limit; a communicator that does not finish in time is
///   aborted, and the error names the call. NCCL's own variables work as usual, except `NCCL_COMM_BLOCKING=1`, with which NCCL would
///   wait without a limit.
/// - **Streams.** NCCL has its own stream, which waits on the device until CubeCL's streams have made a call's tensors. The host waits
///   for the end of each call (for asynchronous calls, a thread of the group does), so errors belong to the call in which they
///   happened. If two communicators are busy at once (`SyncBatchNorm` during overlapped averaging), the GPU must be able to run kernels
///   of both: leave `CUDA_DEVICE_MAX_CONNECTIONS` alone.
/// - **Two ranks on one GPU**, for tests, take NCCL 2.30 or newer with `NCCL_MULTI_RANK_GPU_ENABLE=1`.
///
/// ```
/// use burn_ddp::{Backend, ProcessGroup};
///
/// let builder = ProcessGroup::builder().backend(Backend::Nccl); // then init() or connect()
/// assert_eq!("nccl".parse(), Ok(Backend::Nccl));
/// # let _ = builder;
/// ```
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, Display, VariantArray,
)]
#[strum(serialize_all = "lowercase")]
pub enum Backend {
    /// NCCL if every rank can use it, otherwise the host. The log says which, and why. This is the default.
    #[default]
    Auto,
    /// Tensors are copied to the host and sent over the group's connections. Works with any device.
    Host,
    /// NCCL moves tensors from GPU to GPU. If a rank cannot use it, calls with tensors return
    /// [`DdpError::Nccl`](crate::DdpError::Nccl) on all ranks.
    Nccl,
}

impl FromStr for Backend {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let mut all = Self::VARIANTS.iter().copied();
        all.find(|backend| backend.to_string() == name)
            .ok_or_else(|| format!("`{name}`; expected auto, host or nccl"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for backend in [Backend::Auto, Backend::Host, Backend::Nccl] {
            assert_eq!(backend.to_string().parse(), Ok(backend));
        }
        let error = "gloo".parse::<Backend>().unwrap_err();
        assert!(
            error.contains("`gloo`") && error.contains("nccl"),
            "{error}"
        );
    }
}
