//! Stripes: the parts of a payload, each of which is sent over a connection of its own.

use std::{
    io::{self, Read},
    net::TcpStream,
    ops::Range,
};

use super::{connection, handshake::is_pause};
use crate::{
    Call,
    call::HEADER,
    transport::{Fold, Incoming, Outgoing},
};

/// The number of bytes after which a connection lets the others, and the check of the deadline, have their turn.
const TURN: usize = 4 << 20;
/// The smallest stripe, in bytes, if a payload has several.
const STRIPE: usize = 128 << 10;

/// A stripe that is being sent.
pub(super) struct Sender<'a> {
    pub(super) peer: usize,
    pub(super) stream: &'a TcpStream,
    header: [u8; HEADER],
    payload: &'a [u8],
    /// Bytes sent, header included.
    sent: usize,
}

/// A stripe that is being received.
pub(super) struct Receiver<'a> {
    pub(super) peer: usize,
    pub(super) stream: &'a TcpStream,
    pub(super) call: Call,
    into: &'a mut [u8],
    fold: Option<Fold>,
    size: usize,
    header: [u8; HEADER],
    /// Bytes received, header included.
    received: usize,
    /// The first bytes of an element, the rest of which has not come yet.
    partial: Vec<u8>,
}

/// Why a connection can no longer be used.
pub(super) enum Broken {
    Ended,
    Diverged(Call),
    Garbage(String),
}

/// The stripes of payloads to send. `lanes` has the connections to each rank.
pub(super) fn senders<'a>(
    lanes: &'a [Vec<TcpStream>],
    outgoing: Vec<Outgoing<'a>>,
    own: &Call,
) -> Vec<Sender<'a>> {
    let mut senders = Vec::new();
    for Outgoing {
        peer,
        payload,
        call,
    } in outgoing
    {
        let lanes = &lanes[peer];
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

/// The stripes of payloads to receive. `lanes` has the connections to each rank.
pub(super) fn receivers<'a>(
    lanes: &'a [Vec<TcpStream>],
    incoming: Vec<Incoming<'a>>,
    own: &Call,
) -> Vec<Receiver<'a>> {
    let mut receivers = Vec::new();
    for Incoming {
        peer,
        into,
        fold,
        size,
        call,
    } in incoming
    {
        let lanes = &lanes[peer];
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

/// Cuts a payload into stripes for `lanes` connections. Small payloads use the first connection alone.
/// Stripes start at multiples of 64 bytes, so that no element is cut.
fn stripes(len: usize, lanes: usize) -> impl Iterator<Item = Range<usize>> {
    let count = (len / STRIPE).clamp(1, lanes);
    let step = len.div_ceil(count).next_multiple_of(64);
    (0..count).map(move |i| (i * step).min(len)..((i + 1) * step).min(len))
}

impl Sender<'_> {
    pub(super) fn is_done(&self) -> bool {
        self.sent == HEADER + self.payload.len()
    }

    /// Sends as much as possible without waiting. Returns whether anything was sent.
    pub(super) fn send(&mut self) -> Result<bool, Broken> {
        let before = self.sent;
        while !self.is_done() && self.sent < before + TURN {
            let payload = &self.payload[self.sent.saturating_sub(HEADER)..];
            let slices = [
                io::IoSlice::new(&self.header[self.sent.min(HEADER)..]),
                io::IoSlice::new(&payload[..payload.len().min(TURN)]),
            ];
            match connection::send(self.stream, &slices) {
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
    pub(super) fn is_done(&self) -> bool {
        self.received == HEADER + self.into.len()
    }

    /// Receives what has arrived. Returns whether anything had.
    pub(super) fn receive(&mut self, scratch: &mut [u8]) -> Result<bool, Broken> {
        let before = self.received;
        while !self.is_done() && self.received < before + TURN {
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
        if let Some((op, fold)) = self.fold {
            fold(op, &mut self.into[start..start + whole], &scratch[..whole]);
        }
        self.partial.clear();
        self.partial.extend_from_slice(&scratch[whole..held + step]);
        Ok(step)
    }
}

/// Reads bytes that have arrived, and returns their number: 0 when there are none yet.
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
