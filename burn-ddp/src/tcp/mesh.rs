//! The data plane: a communicator's connections, and the loop that moves messages over them.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    ops::Range,
    os::fd::AsFd,
    sync::{Arc, Mutex},
};

use nix::poll::{PollFd, PollFlags, poll};

use super::{Job, handshake::is_pause};
use crate::{
    Call, DdpError,
    call::HEADER,
    transport::{Deadline, Fold, Incoming, Outgoing, Transport},
};

/// Bytes that are read and combined at a time: they stay in the processor's cache.
const SCRATCH: usize = 256 << 10;
/// Payloads are striped over the lanes when each stripe has at least this many bytes.
const STRIPE: usize = 128 << 10;

/// The connections of one communicator: to each other rank as many as the job has lanes.
pub(crate) struct Mesh {
    job: Arc<Job>,
    communicator: u32,
    /// By rank, then by lane; empty for this rank and for those that are no members.
    lanes: Vec<Vec<TcpStream>>,
    /// Aligned for every element type.
    scratch: Mutex<Vec<u64>>,
}

/// A stripe on its way out.
struct Sender<'a> {
    peer: usize,
    stream: &'a TcpStream,
    header: [u8; HEADER],
    payload: &'a [u8],
    /// Bytes sent, header included.
    sent: usize,
}

/// A stripe on its way in.
struct Receiver<'a> {
    peer: usize,
    stream: &'a TcpStream,
    call: Call,
    into: &'a mut [u8],
    fold: Option<Fold>,
    size: usize,
    header: [u8; HEADER],
    /// Bytes received, header included.
    received: usize,
    /// The start of an element of which the rest has not come yet.
    partial: Vec<u8>,
}

/// Why a connection moves nothing more.
enum Broken {
    Ended,
    Diverged(Call),
    Garbage(String),
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
        Ok(Self {
            job,
            communicator,
            lanes,
            scratch: Mutex::new(vec![0; SCRATCH / size_of::<u64>()]),
        })
    }

    fn senders<'a>(&'a self, outgoing: Vec<Outgoing<'a>>, own: &Call) -> Vec<Sender<'a>> {
        let mut senders = Vec::new();
        for Outgoing {
            peer,
            payload,
            call,
        } in outgoing
        {
            let lanes = &self.lanes[peer];
            let header = call.as_ref().unwrap_or(own).encode();
            for (stream, range) in lanes.iter().zip(stripes(payload.len(), lanes.len())) {
                senders.push(Sender {
                    peer,
                    stream,
                    header,
                    payload: &payload[range],
                    sent: 0,
                });
            }
        }
        senders
    }

    fn receivers<'a>(&'a self, incoming: Vec<Incoming<'a>>, own: &Call) -> Vec<Receiver<'a>> {
        let mut receivers = Vec::new();
        for Incoming {
            peer,
            into,
            fold,
            size,
            call,
        } in incoming
        {
            let lanes = &self.lanes[peer];
            let ranges = stripes(into.len(), lanes.len());
            let mut rest = into;
            for (stream, range) in lanes.iter().zip(ranges) {
                let (into, after) = rest.split_at_mut(range.len());
                rest = after;
                receivers.push(Receiver {
                    peer,
                    stream,
                    call: call.unwrap_or(*own),
                    into,
                    fold,
                    size,
                    header: [0; HEADER],
                    received: 0,
                    partial: Vec::new(),
                });
            }
        }
        receivers
    }

    /// Translates a broken connection into the fault of the group.
    fn broken(&self, peer: usize, call: &Call, broken: Broken) -> DdpError {
        let control = &self.job.control;
        control.fail(match broken {
            Broken::Ended if control.has_left(peer) => DdpError::RankLeft {
                rank: peer,
                call: *call,
            },
            Broken::Ended => DdpError::RankDied { rank: peer },
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
}

/// Cuts a payload into stripes for `lanes` connections. Small payloads go over the first alone.
/// Stripes start at multiples of 64 bytes: no element is cut.
fn stripes(len: usize, lanes: usize) -> impl Iterator<Item = Range<usize>> {
    let count = (len / STRIPE).clamp(1, lanes);
    let step = len.div_ceil(count).next_multiple_of(64);
    (0..count).map(move |i| (i * step).min(len)..((i + 1) * step).min(len))
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
        let mut senders = self.senders(outgoing, call);
        let mut receivers = self.receivers(incoming, call);
        let mut scratch = self.scratch.lock().expect("no panic under lock");
        let scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut scratch);
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
            if moved {
                continue;
            }
            // Only now: what a rank sent before it died still counts.
            if let Some(fault) = control.fault() {
                return Err(fault);
            }
            let Some(left) = deadline.left() else {
                let peers = receivers.iter().map(|receiver| receiver.peer);
                let mut waited_for: Vec<usize> = peers
                    .chain(senders.iter().map(|sender| sender.peer))
                    .collect();
                waited_for.sort_unstable();
                waited_for.dedup();
                let (ranks, why) = self.blame(call, &waited_for);
                return Err(control.fail(DdpError::Timeout {
                    ranks,
                    call: *call,
                    after: deadline.after,
                    why,
                }));
            };
            let mut wanted = vec![PollFd::new(control.fault_signal(), PollFlags::POLLIN)];
            for receiver in &receivers {
                wanted.push(PollFd::new(receiver.stream.as_fd(), PollFlags::POLLIN));
            }
            for sender in &senders {
                wanted.push(PollFd::new(sender.stream.as_fd(), PollFlags::POLLOUT));
            }
            let pause = left.as_millis().clamp(1, 10_000) as u16;
            // Interrupted by a signal or timed out: the loop looks again.
            let _ = poll(&mut wanted, pause);
        }
    }

    fn duplicate(
        &self,
        id: u32,
        members: &[usize],
        deadline: Deadline,
    ) -> Result<Box<dyn Transport>, DdpError> {
        let lanes = self.job.connect(id, members, deadline)?;
        let mesh = Self::new(self.job.clone(), id, lanes);
        Ok(Box::new(mesh.map_err(|error| self.job.unprepared(error))?))
    }

    fn blame(&self, call: &Call, waited_for: &[usize]) -> (Vec<usize>, String) {
        let is_member = |rank: usize| !self.lanes[rank].is_empty();
        let control = &self.job.control;
        control.blame(self.communicator, call, waited_for, is_member)
    }

    fn fail(&self, fault: DdpError) -> DdpError {
        self.job.control.fail(fault)
    }

    fn fault(&self) -> Option<DdpError> {
        self.job.control.fault()
    }
}

impl Sender<'_> {
    fn is_done(&self) -> bool {
        self.sent == HEADER + self.payload.len()
    }

    /// Sends what goes without waiting; returns whether anything went.
    fn send(&mut self) -> Result<bool, Broken> {
        let before = self.sent;
        while !self.is_done() {
            let slices = [
                io::IoSlice::new(&self.header[self.sent.min(HEADER)..]),
                io::IoSlice::new(&self.payload[self.sent.saturating_sub(HEADER)..]),
            ];
            match (&mut &*self.stream).write_vectored(&slices) {
                Ok(0) => return Err(Broken::Ended),
                Ok(written) => self.sent += written,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_pause(&error) => break,
                Err(_) => return Err(Broken::Ended),
            }
        }
        Ok(self.sent > before)
    }
}

impl Receiver<'_> {
    fn is_done(&self) -> bool {
        self.received == HEADER + self.into.len()
    }

    /// Receives what is there; returns whether anything was.
    fn receive(&mut self, scratch: &mut [u8]) -> Result<bool, Broken> {
        let before = self.received;
        while !self.is_done() {
            let step = match self.received.checked_sub(HEADER) {
                None => self.receive_header()?,
                Some(at) if self.fold.is_none() => read(self.stream, &mut self.into[at..])?,
                Some(at) => self.receive_and_fold(at, scratch)?,
            };
            match step {
                0 => break,
                step => self.received += step,
            }
        }
        Ok(self.received > before)
    }

    fn receive_header(&mut self) -> Result<usize, Broken> {
        let step = read(self.stream, &mut self.header[self.received..])?;
        if self.received + step == HEADER {
            match Call::decode(&self.header) {
                Ok(theirs) if theirs == self.call => {}
                Ok(theirs) => return Err(Broken::Diverged(theirs)),
                Err(problem) => return Err(Broken::Garbage(problem)),
            }
        }
        Ok(step)
    }

    fn receive_and_fold(&mut self, at: usize, scratch: &mut [u8]) -> Result<usize, Broken> {
        let held = self.partial.len();
        let want = (self.into.len() - at).min(scratch.len() - held);
        scratch[..held].copy_from_slice(&self.partial);
        let step = read(self.stream, &mut scratch[held..held + want])?;
        let whole = (held + step) / self.size * self.size;
        let start = at - held;
        if let Some(fold) = self.fold {
            fold(
                self.call.op,
                &mut self.into[start..start + whole],
                &scratch[..whole],
            );
        }
        self.partial.clear();
        self.partial.extend_from_slice(&scratch[whole..held + step]);
        Ok(step)
    }
}

/// Reads what is there; 0 when nothing is yet.
fn read(mut stream: &TcpStream, into: &mut [u8]) -> Result<usize, Broken> {
    loop {
        match stream.read(into) {
            Ok(0) => return Err(Broken::Ended),
            Ok(read) => return Ok(read),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if is_pause(&error) => return Ok(0),
            Err(_) => return Err(Broken::Ended),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stripes_cover_the_payload(len in 0usize..4_000_000, lanes in 1usize..9) {
            let ranges: Vec<_> = stripes(len, lanes).collect();
            prop_assert!(ranges.len() <= lanes);
            let mut at = 0;
            for range in &ranges {
                prop_assert_eq!(range.start, at);
                prop_assert_eq!(range.start % 64, 0);
                at = range.end;
            }
            prop_assert_eq!(at, len);
        }
    }
}
