//! Drives an NCCL call from its start to its end, within a time limit: nothing that NCCL does may hold up a rank
//! forever.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{ffi::DeviceCommunicator, plan::Move};
use crate::{DdpError, collective::Collective, transport::Deadline};

/// Why a call failed. The communicator has been aborted.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The group has a fault.
    Fault(DdpError),
    /// The time is over.
    Late,
    /// NCCL failed.
    Failed(String),
}

impl Trouble {
    /// Fails the group because of trouble in a call that waits for the ranks of `waited_for`. Returns the group's fault.
    pub(super) fn fault(self, call: &Collective<'_>, waited_for: &[usize]) -> DdpError {
        let fault = match self {
            Self::Fault(fault) => return fault,
            Self::Late => {
                let (ranks, why) = call.transport.blame(&call.call, waited_for);
                DdpError::Timeout {
                    ranks,
                    call: call.call,
                    after: call.deadline.after,
                    why: format!("{why}; NCCL was at work"),
                }
            }
            Self::Failed(problem) => DdpError::NcclFailed {
                rank: call.transport.number(call.rank),
                call: call.call,
                problem,
            },
        };
        call.transport.fail(fault)
    }
}

/// Makes calls and waits until the device has done them. `fault` is polled meanwhile for a fault of the group.
pub(super) fn drive(
    communicator: &mut DeviceCommunicator,
    moves: &[Move],
    deadline: Deadline,
    fault: impl Fn() -> Option<DdpError>,
) -> Result<(), Trouble> {
    let mut attempt = || {
        communicator.enqueue(moves).map_err(Trouble::Failed)?;
        wait(deadline, &fault, || communicator.accepted())?;
        wait(deadline, &fault, || {
            // A peer's trouble shows in the communicator's state, while the kernels spin.
            communicator.accepted()?;
            communicator.finished()
        })
    };
    let result = attempt();
    end(communicator, result, fault)
}

/// Waits until a new communicator has met its peers.
pub(super) fn meet(
    communicator: &mut DeviceCommunicator,
    deadline: Deadline,
    fault: impl Fn() -> Option<DdpError>,
) -> Result<(), Trouble> {
    let result = wait(deadline, &fault, || communicator.accepted());
    end(communicator, result, fault)
}

/// How long to wait until the control plane reports a rank's death that NCCL may have noticed first.
const HEARSAY: Duration = Duration::from_millis(300);

/// Aborts the communicator if there was trouble. If NCCL failed because a rank is gone, it does not say which. The control
/// plane soon will.
fn end(
    communicator: &mut DeviceCommunicator,
    result: Result<(), Trouble>,
    fault: impl Fn() -> Option<DdpError>,
) -> Result<(), Trouble> {
    let Err(trouble) = result else {
        return Ok(());
    };
    communicator.abort();
    let Trouble::Failed(problem) = trouble else {
        return Err(trouble);
    };
    let start = Instant::now();
    loop {
        if let Some(fault) = fault() {
            return Err(Trouble::Fault(fault));
        }
        if start.elapsed() > HEARSAY {
            return Err(Trouble::Failed(problem));
        }
        thread::sleep(NAP);
    }
}

/// How long a wait spins before it sleeps. Most calls are over by then.
const AWAKE: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);

fn wait(
    deadline: Deadline,
    fault: impl Fn() -> Option<DdpError>,
    mut done: impl FnMut() -> Result<bool, String>,
) -> Result<(), Trouble> {
    let start = Instant::now();
    loop {
        if done().map_err(Trouble::Failed)? {
            return Ok(());
        }
        if let Some(fault) = fault() {
            return Err(Trouble::Fault(fault));
        }
        if deadline.left().is_none() {
            return Err(Trouble::Late);
        }
        match start.elapsed() < AWAKE {
            true => thread::yield_now(),
            false => thread::sleep(NAP),
        }
    }
}
