//! The data plane: a communicator's connections, and the loop that moves messages over them.

use std::{
    io,
    net::TcpStream,
    os::fd::AsFd,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, poll};

use super::{
    Job,
    control::NO_SIGN,
    stripe::{Broken, receivers, senders},
};
use crate::{
    Call, CallKind, DdpError,
    stall::Stall,
    transport::{Deadline, Incoming, Outgoing, Transport},
};

/// Bytes that are read and combined at a time, few enough to stay in the processor's cache.
const SCRATCH: usize = 256 << 10;
/// How long bytes that are on their way are still read after a fault.
const REST: Duration = Duration::from_secs(1);

/// The connections of one communicator: one for each of the job's lanes to each other rank.
pub(crate) struct Mesh {
    job: Arc<Job>,
    communicator: u32,
    /// By rank, then by lane. Empty for this rank and for ranks that are not members.
    lanes: Vec<Vec<TcpStream>>,
    /// Of `u64`, so that the buffer is aligned for every element type.
    scratch: Mutex<Vec<u64>>,
}

impl Mesh {
    pub(super) fn new(
        job: Arc<Job>,
        communicator: u32,
        lanes: Vec<Vec<TcpStream>>,
    ) -> io::Result<Self> {
        for stream in lanes.iter().flatten() {
            stream.set_nonblocking(true)?;
        }
        let members = (0..lanes.len()).filter(|rank| !lanes[*rank].is_empty());
        job.control.join(communicator, members.collect());
        Ok(Self {
            job,
            communicator,
            lanes,
            scratch: Mutex::new(vec![0; SCRATCH / size_of::<u64>()]),
        })
    }

    /// Fails the group because of a broken connection.
    fn broken(&self, peer: usize, call: &Call, broken: Broken) -> DdpError {
        let control = &self.job.control;
        control.fail(match broken {
            Broken::Ended => match control.left_after(self.communicator, peer) {
                Some(calls) => DdpError::RankLeft {
                    rank: peer,
                    calls,
                    call: *call,
                },
                None => DdpError::RankDied { rank: peer },
            },
            Broken::Diverged(theirs) => DdpError::Diverged {
                rank: self.job.own.rank,
                call: *call,
                other: peer,
                other_call: theirs,
                shapes: None,
            },
            Broken::Garbage(problem) => DdpError::Protocol {
                rank: peer,
                problem,
            },
        })
    }

    fn is_member(&self, rank: usize) -> bool {
        !self.lanes[rank].is_empty()
    }

    /// Whether `rank` may hold up a call that waits for the ranks of `waited_for`. Only these can hold up a message; any
    /// member can hold up another call.
    fn concerns(&self, call: &Call, waited_for: &[usize], rank: usize) -> bool {
        match call.kind {
            CallKind::Message => waited_for.contains(&rank),
            _ => self.is_member(rank),
        }
    }

    /// Fails the group because the time of a call is over.
    fn late(&self, call: &Call, waited_for: &[usize], deadline: Deadline) -> DdpError {
        let blamed = self.blame(call, waited_for);
        self.timeout(call, blamed, deadline.after)
    }

    fn timeout(&self, call: &Call, blamed: (Vec<usize>, String), after: Duration) -> DdpError {
        let (ranks, why) = blamed;
        self.fail(DdpError::Timeout {
            ranks,
            call: *call,
            after,
            why,
        })
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.job.control.leave(self.communicator);
    }
}

impl Transport for Mesh {
    fn exchange(
        &self,
        call: &Call,
        outgoing: Vec<Outgoing<'_>>,
        incoming: Vec<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<(), DdpError> {
        let control = &self.job.control;
        control.enter(self.communicator, call);
        let mut senders = senders(&self.lanes, outgoing, call);
        let mut receivers = receivers(&self.lanes, incoming, call);
        let mut scratch = self.scratch.lock().expect("no panic under lock");
        let scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut scratch);
        let (mut faulty, mut quiet, stall) = (None, false, Stall::new());
        loop {
            let mut moved = false;
            // Receiving first frees the peers' buffers.
            for receiver in &mut receivers {
                moved |= receiver
                    .receive(scratch)
                    .map_err(|broken| self.broken(receiver.peer, &receiver.call, broken))?;
            }
            for sender in &mut senders {
                moved |= sender
                    .send()
                    .map_err(|broken| self.broken(sender.peer, call, broken))?;
            }
            senders.retain(|sender| !sender.is_done());
            receivers.retain(|receiver| !receiver.is_done());
            if senders.is_empty() && receivers.is_empty() {
                return Ok(());
            }
            if let Some(fault) = control.fault() {
                // Bytes that a rank sent before it died still count.
                let rest = Instant::now() < *faulty.get_or_insert_with(|| Instant::now() + REST);
                if !moved || !rest {
                    return Err(fault);
                }
            }
            let left = deadline.left();
            if left.is_none() || quiet {
                let peers = receivers.iter().map(|receiver| receiver.peer);
                let mut waited_for: Vec<usize> = peers
                    .chain(senders.iter().map(|sender| sender.peer))
                    .collect();
                waited_for.sort_unstable();
                waited_for.dedup();
                let fault = match left {
                    None => Some(self.late(call, &waited_for, deadline)),
                    Some(_) => self.silent(call, &waited_for, deadline),
                };
                if let Some(fault) = fault {
                    return Err(fault);
                }
                stall.look(self, call, &waited_for, deadline);
            }
            if moved {
                continue;
            }
            let mut wanted = vec![PollFd::new(control.fault_signal(), PollFlags::POLLIN)];
            for receiver in &receivers {
                wanted.push(PollFd::new(receiver.stream.as_fd(), PollFlags::POLLIN));
            }
            for sender in &senders {
                wanted.push(PollFd::new(sender.stream.as_fd(), PollFlags::POLLOUT));
            }
            let pause = left.unwrap_or_default().as_millis().clamp(1, 1000) as u16;
            // When interrupted by a signal or timed out, the loop goes round again.
            quiet = poll(&mut wanted, pause) == Ok(0);
        }
    }

    fn duplicate(
        &self,
        id: u32,
        members: &[usize],
        deadline: Deadline,
    ) -> Result<Box<dyn Transport>, DdpError> {
        // The ranks have just agreed on the number in it.
        let call = self.job.control.doing(self.communicator);
        let lanes = self.job.connect(id, members, call, deadline)?;
        let mesh = Self::new(self.job.clone(), id, lanes);
        Ok(Box::new(mesh.map_err(|error| self.job.unprepared(error))?))
    }

    fn blame(&self, call: &Call, waited_for: &[usize]) -> (Vec<usize>, String) {
        let concerned = |rank| self.concerns(call, waited_for, rank);
        let control = &self.job.control;
        control.blame(self.communicator, call, waited_for, concerned)
    }

    fn silent(&self, call: &Call, waited_for: &[usize], deadline: Deadline) -> Option<DdpError> {
        let concerned = |rank| self.concerns(call, waited_for, rank);
        let silent = self.job.control.silent(deadline.silence, concerned);
        let blamed = (!silent.is_empty()).then(|| (silent, NO_SIGN.into()));
        blamed.map(|blamed| self.timeout(call, blamed, deadline.silence))
    }

    fn fail(&self, fault: DdpError) -> DdpError {
        self.job.control.fail(fault)
    }

    fn fault(&self) -> Option<DdpError> {
        self.job.control.fault()
    }
}

#[cfg(test)]
mod tests;
