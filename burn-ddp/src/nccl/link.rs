//! A rank's end of an NCCL communicator.

use std::sync::{Mutex, MutexGuard};

use super::{
    drive::{Trouble, drive, meet},
    faults::faults,
    ffi::{DeviceCommunicator, DeviceStream, Functions, UniqueId},
    plan::{Errand, Move},
};
use crate::{DdpError, NcclError, collective::Collective};

/// An NCCL communicator over the ranks of a group. Each of its calls ends, either with success, or within the group's
/// time limit with a fault of the group.
pub(crate) struct Link {
    ordinal: usize,
    communicator: Mutex<DeviceCommunicator>,
}

impl Link {
    /// Opens this rank's link. All ranks call this, for the same `call`. Rank 0 calls `identity` to create the identity of
    /// the communicator. `side` returns this rank's NCCL and a stream of its device.
    pub(super) fn open(
        call: &Collective<'_>,
        ordinal: usize,
        identity: impl FnOnce() -> Result<UniqueId, NcclError>,
        side: impl FnOnce() -> Result<(Functions, Box<dyn DeviceStream>), String>,
    ) -> Result<Self, DdpError> {
        let id = share(call, identity)?;
        let everyone: Vec<usize> = call.peers().collect();
        let communicator = side().and_then(|(functions, stream)| {
            DeviceCommunicator::join(functions, stream, id, call.rank, call.world_size)
        });
        let mut communicator =
            communicator.map_err(|problem| Trouble::Failed(problem).fault(call, &everyone))?;
        meet(&mut communicator, call.deadline, faults(call, &everyone))
            .map_err(|trouble| trouble.fault(call, &everyone))?;
        Ok(Self {
            ordinal,
            communicator: Mutex::new(communicator),
        })
    }

    /// The ordinal of the device.
    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Locks the communicator, for one call.
    pub(super) fn communicator(&self) -> MutexGuard<'_, DeviceCommunicator> {
        self.communicator.lock().expect("no panic under lock")
    }
}

/// Sends the identity that rank 0 creates to all ranks. If it cannot create one, all ranks get the reason.
fn share(
    call: &Collective<'_>,
    identity: impl FnOnce() -> Result<UniqueId, NcclError>,
) -> Result<UniqueId, DdpError> {
    let made = match call.rank {
        0 => serde_json::to_vec(&identity().map(Vec::from)).expect("plain data"),
        _ => Vec::new(),
    };
    let mut texts = call.all_gather_uneven(&made)?;
    let protocol = |problem: String| {
        call.transport.fail(DdpError::Protocol {
            rank: call.transport.number(0),
            problem: format!("its identity for NCCL: {problem}"),
        })
    };
    let made: Result<Vec<u8>, NcclError> = serde_json::from_slice(&texts.swap_remove(0))
        .map_err(|error| protocol(error.to_string()))?;
    let bytes = made.map_err(|reason| DdpError::Nccl {
        rank: call.transport.number(0),
        reason,
    })?;
    let len = bytes.len();
    bytes
        .try_into()
        .map_err(|_| protocol(format!("{len} bytes")))
}

/// Makes the NCCL calls that belong to a call of the group, and waits until this device has done its part.
pub(super) fn run(
    communicator: &mut DeviceCommunicator,
    call: &Collective<'_>,
    errand: Errand,
    moves: &[Move],
) -> Result<(), DdpError> {
    let waited_for = errand.waits_for(call);
    let faults = faults(call, &waited_for);
    drive(communicator, moves, call.deadline, faults)
        .map_err(|trouble| trouble.fault(call, &waited_for))
}

#[cfg(all(test, feature = "cuda"))]
mod tests;
