//! A rank's end of a communicator of NCCL.

use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::CudaContext;

use super::{
    drive::{Trouble, drive, meet},
    ffi::DeviceCommunicator,
    found::nccl,
    plan::{Errand, Move},
};
use crate::{DdpError, NcclError, NcclVersion, backend::Gpu, collective::Collective};

/// The GPU of this number and this machine's NCCL.
pub(crate) fn offer(ordinal: usize) -> Result<(Gpu, NcclVersion), NcclError> {
    let version = nccl()?.version;
    let uuid = context(ordinal)?.uuid().map_err(driver)?;
    let gpu = Gpu {
        ordinal,
        uuid: uuid.bytes.map(|byte| byte as u8),
    };
    Ok((gpu, version))
}

/// The device's primary context, which is CubeCL's as well.
fn context(ordinal: usize) -> Result<Arc<CudaContext>, NcclError> {
    CudaContext::new(ordinal).map_err(driver)
}

fn driver(error: cudarc::driver::DriverError) -> NcclError {
    NcclError::Driver {
        problem: error.to_string(),
    }
}

/// A communicator of NCCL over the ranks of a group. Its calls end: with success, or within the group's
/// time limit with a fault of the group.
pub(crate) struct Link {
    ordinal: usize,
    communicator: Mutex<DeviceCommunicator>,
}

impl Link {
    /// Meets the other ranks, which call this too. `call` is theirs as well.
    pub(crate) fn open(call: &Collective<'_>, ordinal: usize) -> Result<Self, DdpError> {
        let refused = |reason| DdpError::Nccl {
            rank: call.rank,
            reason,
        };
        let found = nccl().map_err(refused)?;
        // Rank 0's identity for the communicator, or nothing when it has none to give.
        let mut id = [0; 129];
        let mut failure = None;
        if call.rank == 0 {
            match found.unique_id() {
                Ok(bytes) => {
                    id[0] = 1;
                    id[1..].copy_from_slice(&bytes);
                }
                Err(reason) => failure = Some(reason),
            }
        }
        call.broadcast(&mut id, 0)?;
        let [1, id @ ..] = id else {
            let reason =
                failure.unwrap_or_else(|| found.unusable("rank 0 made no identity".into()));
            return Err(DdpError::Nccl { rank: 0, reason });
        };
        let everyone: Vec<usize> = call.peers().collect();
        let communicator = context(ordinal)
            .map_err(|error| error.to_string())
            .and_then(|context| {
                let library = found.library();
                DeviceCommunicator::join(library, context, id, call.rank, call.world_size)
            });
        let mut communicator =
            communicator.map_err(|problem| Trouble::Failed(problem).fault(call, &everyone))?;
        meet(&mut communicator, call.deadline, || call.transport.fault())
            .map_err(|trouble| trouble.fault(call, &everyone))?;
        log::info!(
            "burn-ddp: rank {} of {} is on cuda:{ordinal}, over NCCL {}",
            call.rank,
            call.world_size,
            found.version
        );
        Ok(Self {
            ordinal,
            communicator: Mutex::new(communicator),
        })
    }

    /// The number of the device.
    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The communicator, for one call.
    pub(super) fn communicator(&self) -> MutexGuard<'_, DeviceCommunicator> {
        self.communicator.lock().expect("no panic under lock")
    }
}

/// Makes calls of NCCL that belong to a call of some ranks, and waits until this device has done its part.
pub(super) fn run(
    communicator: &mut DeviceCommunicator,
    call: &Collective<'_>,
    errand: Errand,
    moves: &[Move],
) -> Result<(), DdpError> {
    drive(communicator, moves, call.deadline, || {
        call.transport.fault()
    })
    .map_err(|trouble| trouble.fault(call, &errand.waits_for(call)))
}

#[cfg(all(test, feature = "cuda"))]
mod tests;
