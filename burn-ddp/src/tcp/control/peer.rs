//! What a rank knows about another, and the frames that they exchange.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::TcpStream,
    sync::Arc,
    time::Instant,
};

use rmp_serde::decode;
use serde::{Deserialize, Serialize};

use crate::{Call, DdpError, tcp::handshake::is_pause};

/// The longest valid frame, in bytes.
pub(super) const LONGEST: usize = 1 << 20;

/// What one rank tells another.
#[derive(Serialize, Deserialize)]
pub(super) enum Frame {
    /// A sign of life, with the call that the rank entered last in each of its communicators.
    Alive(HashMap<u32, Call>),
    /// The rank no longer needs the other.
    Goodbye,
    /// The group has a fault.
    Abort(DdpError),
    /// The rank has left a communicator, after so many calls.
    Left(u32, u64),
}

impl Frame {
    /// The bytes of a frame, after their number. `None` if they are too many, or if it has an error of this machine's system.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        let body = rmp_serde::to_vec(self).ok();
        let body = body.filter(|body| body.len() <= LONGEST)?;
        Some([&(body.len() as u32).to_le_bytes()[..], &body].concat())
    }
}

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
    pub(super) fn push(&mut self, frame: &[u8]) {
        self.unsent.extend_from_slice(frame);
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

    /// Reads what has arrived and returns the complete frames, or why one makes no sense. Notes the end of the connection.
    pub(super) fn read(&mut self) -> Vec<Result<Frame, decode::Error>> {
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
        while let Some((length, rest)) = self.received.split_first_chunk() {
            let length = u32::from_le_bytes(*length) as usize;
            if length > LONGEST {
                self.closed = true;
                break;
            }
            let Some((body, _)) = rest.split_at_checked(length) else {
                break;
            };
            frames.push(rmp_serde::from_slice(body));
            self.received.drain(..4 + length);
        }
        frames
    }
}
