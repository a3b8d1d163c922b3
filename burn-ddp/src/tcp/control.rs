//! The control plane of a job: one connection between any two ranks, watched by a thread.
//!
//! It tells at once that a rank died (its connection ends without a goodbye), carries the first
//! fault to everyone, and knows from heartbeats who is stopped and who is merely late.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::TcpStream,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, poll};

use super::handshake::is_pause;
use crate::{Call, CallKind, DdpError, transport::Deadline};

/// How often a rank tells that it lives.
const HEARTBEAT: Duration = Duration::from_millis(250);
/// A rank not heard of for this long is stopped or unreachable.
const SILENCE: Duration = Duration::from_millis(1500);
/// Frames are small; a longer one is no frame.
const LONGEST: usize = 1 << 20;

const ALIVE: u8 = 1;
const GOODBYE: u8 = 2;
const ABORT: u8 = 3;

/// What is known of another rank.
struct Peer {
    stream: TcpStream,
    received: Vec<u8>,
    unsent: Vec<u8>,
    heard: Instant,
    /// The number of calls it has entered, by communicator.
    progress: HashMap<u32, u64>,
    left: bool,
    closed: bool,
}

struct State {
    peers: HashMap<usize, Peer>,
    progress: HashMap<u32, u64>,
    fault: Option<DdpError>,
}

struct Shared {
    rank: usize,
    state: Mutex<State>,
    stop: AtomicBool,
    /// Closed when a fault occurs, so that `fault_end` becomes readable for everyone who polls it.
    fault_start: UnixStream,
    fault_end: UnixStream,
    wake: UnixStream,
}

/// The control connections of one rank.
pub(crate) struct Control {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    pub(crate) fn start(rank: usize, streams: HashMap<usize, TcpStream>) -> io::Result<Self> {
        let (fault_start, fault_end) = UnixStream::pair()?;
        let (wake, woken) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        let mut peers = HashMap::new();
        for (rank, stream) in streams {
            stream.set_nonblocking(true)?;
            let peer = Peer {
                stream,
                received: Vec::new(),
                unsent: Vec::new(),
                heard: Instant::now(),
                progress: HashMap::new(),
                left: false,
                closed: false,
            };
            peers.insert(rank, peer);
        }
        let shared = Arc::new(Shared {
            rank,
            state: Mutex::new(State {
                peers,
                progress: HashMap::new(),
                fault: None,
            }),
            stop: AtomicBool::new(false),
            fault_start,
            fault_end,
            wake,
        });
        let thread = thread::Builder::new().name("ddp-control".into()).spawn({
            let shared = shared.clone();
            move || watch(&shared, &woken)
        })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Notes that this rank enters a call. Messages between two ranks are numbered apart from the calls
    /// of all, and say nothing of these.
    pub(crate) fn enter(&self, communicator: u32, call: &Call) {
        if call.kind != CallKind::Message {
            let mut state = self.shared.state();
            state.progress.insert(communicator, call.sequence + 1);
        }
    }

    pub(crate) fn fault(&self) -> Option<DdpError> {
        self.shared.state().fault.clone()
    }

    /// Becomes readable when the group has a fault.
    pub(crate) fn fault_signal(&self) -> BorrowedFd<'_> {
        self.shared.fault_end.as_fd()
    }

    /// Ends the group with this fault, unless it already has one; returns the one it has.
    pub(crate) fn fail(&self, fault: DdpError) -> DdpError {
        self.shared.fail(&mut self.shared.state(), fault)
    }

    /// Tells all that this rank needs nobody any more. What others have to say is still heard.
    pub(crate) fn say_goodbye(&self) {
        for peer in self.shared.state().peers.values_mut() {
            peer.push(GOODBYE, &[]);
        }
    }

    /// Waits until all ranks have said goodbye; in time's lack, or at a fault, returns those that have not.
    pub(crate) fn wait_for_goodbyes(&self, deadline: Deadline) -> Result<(), Vec<usize>> {
        loop {
            let state = self.shared.state();
            let staying = state.peers.iter().filter(|(_, peer)| !peer.left);
            let mut staying: Vec<usize> = staying.map(|(rank, _)| *rank).collect();
            staying.sort_unstable();
            if state.fault.is_some() || !staying.is_empty() && deadline.left().is_none() {
                return Err(staying);
            }
            if staying.is_empty() {
                return Ok(());
            }
            drop(state);
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Whether a rank said goodbye. Waits a little for what is on its way when it did not.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        let deadline = Instant::now() + SILENCE;
        loop {
            let state = self.shared.state();
            if state.fault.is_some() || state.peers.get(&rank).is_none_or(|peer| peer.left) {
                return state.fault.is_none();
            }
            drop(state);
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Which members of a communicator hold up its call, and what is known of them. Where nothing
    /// is, it is those of `waited_for`. Nobody but them has to do with a message.
    pub(crate) fn blame(
        &self,
        communicator: u32,
        call: &Call,
        waited_for: &[usize],
        is_member: impl Fn(usize) -> bool,
    ) -> (Vec<usize>, String) {
        let state = self.shared.state();
        let is_message = call.kind == CallKind::Message;
        let concerned = |rank: usize| match is_message {
            true => waited_for.contains(&rank),
            false => is_member(rank),
        };
        let mut silent: Vec<usize> = Vec::new();
        let mut late: Vec<(usize, u64)> = Vec::new();
        for (rank, peer) in state.peers.iter().filter(|(rank, _)| concerned(**rank)) {
            let entered = peer.progress.get(&communicator).copied().unwrap_or(0);
            if peer.heard.elapsed() > SILENCE {
                silent.push(*rank);
            } else if !is_message && entered <= call.sequence {
                late.push((*rank, entered));
            }
        }
        if !silent.is_empty() {
            silent.sort_unstable();
            let why = "no sign of life: stopped or unreachable".into();
            return (silent, why);
        }
        late.sort_unstable();
        if !late.is_empty() {
            let calls: Vec<String> = late
                .iter()
                .map(|(rank, entered)| format!("rank {rank} has made {entered} calls so far"))
                .collect();
            let why = format!("alive, but not in this call yet ({})", calls.join(", "));
            return (late.into_iter().map(|(rank, _)| rank).collect(), why);
        }
        let why = match is_message {
            true => "alive, but the message did not come through",
            false => "alive and in the call, but too slow",
        };
        (waited_for.to_vec(), why.into())
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if thread::panicking() {
            let (rank, reason) = (self.shared.rank, "it panicked".into());
            self.fail(DdpError::Aborted { rank, reason });
        }
        self.say_goodbye();
        self.shared.stop.store(true, Ordering::SeqCst);
        // A full pipe wakes as well as a new byte does.
        let _ = (&self.shared.wake).write(&[0]);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic; a failed join leaves nothing to do.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under lock")
    }

    fn fail(&self, state: &mut State, fault: DdpError) -> DdpError {
        if let Some(earlier) = &state.fault {
            return earlier.clone();
        }
        // What cannot be told as it is (an error of this machine's system) is told in words.
        let in_words = |_| {
            let (rank, reason) = (self.rank, fault.to_string());
            let fault = DdpError::Aborted { rank, reason };
            let text = serde_json::to_vec(&fault).expect("a number and a text");
            (text, fault)
        };
        let told = serde_json::to_vec(&fault).map(|text| (text, fault.clone()));
        let (text, fault) = told.unwrap_or_else(in_words);
        log::error!("burn-ddp: rank {}: {fault}", self.rank);
        // Also what another rank has told: it may know fewer ranks than this one.
        for peer in state.peers.values_mut() {
            peer.push(ABORT, &text);
        }
        state.fault = Some(fault.clone());
        // Only fails when it is closed already, which is what is wanted.
        let _ = self.fault_start.shutdown(std::net::Shutdown::Both);
        fault
    }
}

impl Peer {
    /// Queues a frame, and sends as much as goes without waiting.
    fn push(&mut self, kind: u8, body: &[u8]) {
        self.unsent.push(kind);
        self.unsent
            .extend_from_slice(&(body.len() as u32).to_le_bytes());
        self.unsent.extend_from_slice(body);
        self.flush();
    }

    fn flush(&mut self) {
        while !self.unsent.is_empty() && !self.closed {
            match self.stream.write(&self.unsent) {
                Ok(written) if written > 0 => {
                    self.unsent.drain(..written);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_pause(&error) => return,
                // Reading will show that it is closed.
                _ => return,
            }
        }
    }

    /// Reads what there is and returns the whole frames; notes the end of the connection.
    fn read(&mut self) -> Vec<(u8, Vec<u8>)> {
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
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

fn watch(shared: &Shared, woken: &UnixStream) {
    let mut beat = Instant::now();
    // Polled without the lock: cloned handles stay valid whatever happens to the peers.
    let streams: Vec<(usize, TcpStream)> = shared
        .state()
        .peers
        .iter()
        .filter_map(|(rank, peer)| Some((*rank, peer.stream.try_clone().ok()?)))
        .collect();
    let mut open: Vec<&(usize, TcpStream)> = streams.iter().collect();
    while !shared.stop.load(Ordering::SeqCst) {
        let mut wanted: Vec<PollFd<'_>> = open
            .iter()
            .map(|(_, stream)| PollFd::new(stream.as_fd(), PollFlags::POLLIN))
            .collect();
        wanted.push(PollFd::new(woken.as_fd(), PollFlags::POLLIN));
        let pause = HEARTBEAT.saturating_sub(beat.elapsed()).as_millis() as u16;
        // An interrupted poll is as good as one that timed out.
        let _ = poll(&mut wanted, pause);
        let mut state = shared.state();
        for (rank, _) in &open {
            hear(shared, &mut state, *rank);
        }
        if beat.elapsed() >= HEARTBEAT {
            beat = Instant::now();
            let mut progress = Vec::new();
            for (communicator, sequence) in &state.progress {
                progress.extend_from_slice(&communicator.to_le_bytes());
                progress.extend_from_slice(&sequence.to_le_bytes());
            }
            for peer in state.peers.values_mut() {
                match peer.unsent.is_empty() {
                    true => peer.push(ALIVE, &progress),
                    // A peer that does not read gets no more beats to read.
                    false => peer.flush(),
                }
            }
        }
        open.retain(|(rank, _)| !state.peers[rank].closed);
    }
}

/// Takes in what one rank has to say.
fn hear(shared: &Shared, state: &mut State, rank: usize) {
    let peer = state.peers.get_mut(&rank).expect("every rank has a peer");
    let frames = peer.read();
    let mut fault = None;
    for (kind, body) in frames {
        match kind {
            ALIVE => {
                for entry in body.chunks_exact(12) {
                    let communicator = u32::from_le_bytes(entry[..4].try_into().expect("4 bytes"));
                    let sequence = u64::from_le_bytes(entry[4..].try_into().expect("8 bytes"));
                    peer.progress.insert(communicator, sequence);
                }
            }
            GOODBYE => peer.left = true,
            ABORT => {
                fault = Some(serde_json::from_slice(&body).unwrap_or(DdpError::Aborted {
                    rank,
                    reason: "for a reason that could not be read".into(),
                }))
            }
            kind => {
                fault = Some(DdpError::Protocol {
                    rank,
                    problem: format!("a control frame of kind {kind}"),
                })
            }
        }
    }
    if peer.closed && !peer.left && fault.is_none() {
        fault = Some(DdpError::RankDied { rank });
    }
    if let Some(fault) = fault {
        shared.fail(state, fault);
    }
}

#[cfg(test)]
mod tests;
