//! The control plane of a job: one connection between any two ranks, watched by a thread.
//!
//! It tells at once that a rank died (its connection ends without a goodbye), carries the first
//! fault to everyone, and knows from heartbeats who is stopped and who is merely late.

use std::{
    collections::HashMap,
    io::{self, Write},
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

mod peer;
mod watch;

use self::{
    peer::{ABORT, GOODBYE, LEFT, LONGEST, Peer, calls, entry},
    watch::watch,
};
use crate::{Call, CallKind, DdpError, launch, transport::Deadline};

/// How often a rank tells that it lives.
const HEARTBEAT: Duration = Duration::from_millis(250);
/// A rank not heard of for this long is stopped or unreachable.
const SILENCE: Duration = Duration::from_millis(1500);
/// What is told of a fault in words is cut to so many bytes. Escapes make up to six of one.
const WORDS: usize = 64 << 10;

/// What is known of ranks that say nothing.
pub(super) const NO_SIGN: &str = "no sign of life: stopped or unreachable";

struct State {
    peers: HashMap<usize, Peer>,
    /// The communicators that this rank is in.
    joined: HashMap<u32, Joined>,
    /// The lowest number that no communicator of this rank has had.
    next: u32,
    /// All that had come by then has been heard.
    looked: Instant,
    fault: Option<DdpError>,
}

/// A communicator that this rank is in.
#[derive(Debug, PartialEq)]
struct Joined {
    members: Vec<usize>,
    /// The call that this rank entered last.
    doing: Option<Call>,
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
            peers.insert(rank, Peer::new(stream)?);
        }
        let shared = Arc::new(Shared {
            rank,
            state: Mutex::new(State {
                peers,
                joined: HashMap::new(),
                next: 0,
                looked: Instant::now(),
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

    /// Notes that this rank is in a communicator now. Others of the same number may have other members.
    pub(crate) fn join(&self, communicator: u32, members: Vec<usize>) {
        let mut state = self.shared.state();
        let doing = None;
        state.joined.insert(communicator, Joined { members, doing });
        state.next = state.next.max(communicator + 1);
    }

    /// Tells the members of a communicator that this rank leaves it.
    pub(crate) fn leave(&self, communicator: u32) {
        let mut state = self.shared.state();
        let Some(left) = state.joined.remove(&communicator) else {
            return;
        };
        let frame = entry(communicator, calls(left.doing.as_ref()));
        for member in left.members {
            if let Some(peer) = state.peers.get_mut(&member) {
                peer.left.remove(&communicator);
                peer.push(LEFT, &frame);
            }
        }
    }

    /// Notes that this rank enters a call. Messages between two ranks are numbered apart from the calls
    /// of all, and say nothing of these.
    pub(crate) fn enter(&self, communicator: u32, call: &Call) {
        if call.kind != CallKind::Message {
            let mut state = self.shared.state();
            if let Some(joined) = state.joined.get_mut(&communicator) {
                joined.doing = Some(*call);
            }
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
            let staying = state.peers.iter().filter(|(_, peer)| !peer.said_goodbye);
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

    /// After how many calls a rank left a communicator, if it says so. Waits a little for what is on its way.
    pub(crate) fn left_after(&self, communicator: u32, rank: usize) -> Option<u64> {
        let deadline = Instant::now() + SILENCE;
        loop {
            let state = self.shared.state();
            let calls = state.peers.get(&rank)?.left.get(&communicator).copied();
            if calls.is_some() || state.fault.is_some() || Instant::now() >= deadline {
                return calls;
            }
            drop(state);
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// The ranks that have given no sign of life for so long, of those that are concerned.
    pub(crate) fn silent(&self, long: Duration, concerned: impl Fn(usize) -> bool) -> Vec<usize> {
        self.shared.state().silent(long, concerned)
    }

    /// Which of the ranks that are concerned hold up a call of a communicator, and what is known of them. Where
    /// nothing is, it is those of `waited_for`.
    pub(crate) fn blame(
        &self,
        communicator: u32,
        call: &Call,
        waited_for: &[usize],
        concerned: impl Fn(usize) -> bool,
    ) -> (Vec<usize>, String) {
        let state = self.shared.state();
        let is_message = call.kind == CallKind::Message;
        let silent = state.silent(SILENCE, &concerned);
        if !silent.is_empty() {
            return (silent, NO_SIGN.into());
        }
        let peers = state.peers.iter().filter(|(rank, _)| concerned(**rank));
        let mut late: Vec<(usize, u64)> = peers
            .map(|(rank, peer)| (*rank, peer.calls(communicator)))
            .filter(|(_, entered)| !is_message && *entered <= call.sequence)
            .collect();
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
        let told = serde_json::to_vec(&fault).ok();
        let told = told.filter(|text| text.len() <= LONGEST);
        let (text, fault) = match told {
            Some(text) => (text, fault),
            None => {
                let fault = in_words(fault, self.rank);
                let text = serde_json::to_vec(&fault).expect("a number and a text");
                (text, fault)
            }
        };
        log::error!("burn-ddp: rank {}: {fault}", self.rank);
        // Also what another rank has told: it may know fewer ranks than this one.
        for peer in state.peers.values_mut() {
            peer.push(ABORT, &text);
        }
        launch::blame(self.rank, &fault);
        state.fault = Some(fault.clone());
        // Only fails when it is closed already, which is what is wanted.
        let _ = self.fault_start.shutdown(std::net::Shutdown::Both);
        fault
    }
}

/// What cannot be told as it is: an error of this machine's system, or one at great length.
fn in_words(fault: DdpError, own: usize) -> DdpError {
    let (rank, mut reason) = match fault {
        DdpError::Aborted { rank, reason } => (rank, reason),
        fault => (own, fault.to_string()),
    };
    reason.truncate(reason.floor_char_boundary(WORDS));
    DdpError::Aborted { rank, reason }
}

impl State {
    /// The ranks that have given no sign of life for so long, of those that are concerned and have not left.
    fn silent(&self, long: Duration, concerned: impl Fn(usize) -> bool) -> Vec<usize> {
        let silent = self.peers.iter().filter(|(rank, peer)| {
            let silence = self.looked.saturating_duration_since(peer.heard);
            concerned(**rank) && !peer.said_goodbye && silence > long
        });
        let mut silent: Vec<usize> = silent.map(|(rank, _)| *rank).collect();
        silent.sort_unstable();
        silent
    }

    /// Whether this rank is in a communicator, or will be: another may leave before it has come.
    fn needs(&self, communicator: u32) -> bool {
        communicator >= self.next || self.joined.contains_key(&communicator)
    }

    /// What another rank does that differs from what this one does in its place: this one's call, and that one's.
    fn divergence(&self, rank: usize) -> Option<(Call, Call)> {
        let peer = self.peers.get(&rank)?;
        let shared = self
            .joined
            .iter()
            .filter(|(_, it)| it.members.contains(&rank));
        let mut pairs = shared.filter_map(|(id, it)| it.doing.zip(peer.doing.get(id).copied()));
        pairs.find(|(own, theirs)| own.excludes(theirs))
    }
}

#[cfg(test)]
mod tests;
