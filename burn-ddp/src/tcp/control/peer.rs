//! What a rank knows about another, and the frames that they exchange.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::TcpStream,
    sync::Arc,
    time::Instant,
};

use crate::{Call, call::HEADER, tcp::handshake::is_pause};

/// The longest valid frame, in bytes.
pub(super) const LONGEST: usize = 1 << 20;

pub(super) const ALIVE: u8 = 1;
pub(super) const GOODBYE: u8 = 2;
pub(super) const ABORT: u8 = 3;
pub(super) const LEFT: u8 = 4;
/// The size in bytes of a communicator's number and a number of calls.
const ENTRY: usize = 12;
/// The size in bytes of a communicator's number and a call.
const DOING: usize = 4 + HEADER;

/// What this rank knows about another.
pub(super) struct Peer {
    pub(super) stream: Arc<TcpStream>,
    received: Vec<u8>,
    pub(super) unsent: Vec<u8>,
    pub(super) heard: Instant,
    /// The call that the other rank entered last, by communicator.
    pub(super) doing: HashMap<u32, Call>,
    /// The communicators of this rank that the other has left, and after how many calls.
    pub(super) left: HashMap<u32, u64>,
    pub(super) said_goodbye: bool,
    pub(super) closed: bool,
}

/// The number of calls that a rank has entered, given the last one.
pub(super) fn calls(last: Option<&Call>) -> u64 {
    last.map_or(0, |call| call.sequence + 1)
}

/// Encodes a communicator's number and a number of calls.
pub(super) fn entry(communicator: u32, calls: u64) -> [u8; ENTRY] {
    let mut bytes = [0; ENTRY];
    bytes[..4].copy_from_slice(&communicator.to_le_bytes());
    bytes[4..].copy_from_slice(&calls.to_le_bytes());
    bytes
}

pub(super) fn entries(body: &[u8]) -> impl Iterator<Item = (u32, u64)> {
    body.as_chunks::<ENTRY>().0.iter().map(|entry| {
        let (communicator, calls) = entry.split_at(4);
        (
            u32::from_le_bytes(communicator.try_into().expect("4 bytes")),
            u64::from_le_bytes(calls.try_into().expect("8 bytes")),
        )
    })
}

/// Encodes a communicator's number and the call that a rank entered last there.
pub(super) fn doing(communicator: u32, call: &Call) -> [u8; DOING] {
    let mut bytes = [0; DOING];
    bytes[..4].copy_from_slice(&communicator.to_le_bytes());
    bytes[4..].copy_from_slice(&call.encode());
    bytes
}

/// Decodes the call that a rank entered last in each of its communicators. An error says what is wrong.
pub(super) fn all_doing(body: &[u8]) -> Result<HashMap<u32, Call>, String> {
    let entries = body.as_chunks::<DOING>().0.iter().map(|entry| {
        let (communicator, call) = entry.split_at(4);
        let communicator = u32::from_le_bytes(communicator.try_into().expect("4 bytes"));
        let call = Call::decode(call.try_into().expect("a header"))?;
        Ok((communicator, call))
    });
    entries.collect()
}

impl Peer {
    /// The number of calls that the other rank has entered in a communicator.
    pub(super) fn calls(&self, communicator: u32) -> u64 {
        calls(self.doing.get(&communicator))
    }

    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream: Arc::new(stream),
            received: Vec::new(),
            unsent: Vec::new(),
            heard: Instant::now(),
            doing: HashMap::new(),
            left: HashMap::new(),
            said_goodbye: false,
            closed: false,
        })
    }

    /// Queues a frame, and sends as much as possible without waiting.
    pub(super) fn push(&mut self, kind: u8, body: &[u8]) {
        self.unsent.push(kind);
        self.unsent
            .extend_from_slice(&(body.len() as u32).to_le_bytes());
        self.unsent.extend_from_slice(body);
        self.flush();
    }

    pub(super) fn flush(&mut self) {
        while !self.unsent.is_empty() && !self.closed {
            match (&*self.stream).write(&self.unsent) {
                Ok(written) if written > 0 => {
                    self.unsent.drain(..written);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_pause(&error) => return,
                // The next read will notice that the connection is closed.
                _ => return,
            }
        }
    }

    /// Reads what has arrived and returns the complete frames. Notes the end of the connection.
    pub(super) fn read(&mut self) -> Vec<(u8, Vec<u8>)> {
        let mut buffer = [0; 4096];
        loop {
            match (&*self.stream).read(&mut buffer) {
                Ok(0) => {
                    self.closed = true;
                    break;
                }
                Ok(read) => {
                    self.heard = Instant::now();
                    self.received.extend_from_slice(&buffer[..read]);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_pause(&error) => break,
                Err(_) => {
                    self.closed = true;
                    break;
                }
            }
        }
        let mut frames = Vec::new();
        while let Some((head, _)) = self.received.split_at_checked(5) {
            let kind = head[0];
            let length = u32::from_le_bytes(head[1..].try_into().expect("4 bytes")) as usize;
            if length > LONGEST {
                self.closed = true;
                break;
            }
            if self.received.len() < 5 + length {
                break;
            }
            let body = self.received[5..5 + length].to_vec();
            self.received.drain(..5 + length);
            frames.push((kind, body));
        }
        frames
    }
}
