//! The control plane of a job: one connection between any two ranks, watched by a thread.
//!
//! It notices at once when a rank dies (its connection ends without a goodbye), carries the first
//! fault to all ranks, and distinguishes by heartbeats ranks that are stopped from ranks that are merely late.

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
    peer::{Frame, Peer, calls},
    watch::watch,
};
use crate::{
    Call, CallKind, DdpError, launch,
    transport::{Deadline, IF_LATE},
};

/// How often a rank sends a heartbeat.
const HEARTBEAT: Duration = Duration::from_millis(250);
/// A rank that has sent nothing for this long is considered stopped or unreachable.
const SILENCE: Duration = Duration::from_millis(1500);
/// The number of bytes to which the text of a fault is cut.
const WORDS: usize = 64 << 10;

/// The explanation of a timeout by ranks that send nothing.
pub(super) const NO_SIGN: &str = "no sign of life: stopped or unreachable";

struct State {
    peers: HashMap<usize, Peer>,
    /// The communicators that this rank belongs to.
    joined: HashMap<u32, Joined>,
    /// The lowest number above those of all communicators that this rank has ever joined.
    next: u32,
    /// Everything that had arrived by this time has been read.
    looked: Instant,
    fault: Option<DdpError>,
}

/// A communicator that this rank belongs to.
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
    /// Closed when a fault occurs, so that `fault_end` becomes readable for all threads that poll it.
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

    /// Notes that this rank has joined a communicator. Communicators with other members may have the same number.
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
        let frame = Frame::Left(communicator, calls(left.doing.as_ref()));
        let frame = frame.encode().expect("two numbers");
        for member in left.members {
            if let Some(peer) = state.peers.get_mut(&member) {
                peer.left.remove(&communicator);
                peer.push(&frame);
            }
        }
    }

    /// Notes that this rank enters a call. Messages between two ranks are ignored: they are numbered separately from the
    /// calls that all ranks make.
    pub(crate) fn enter(&self, communicator: u32, call: &Call) {
        if call.kind != CallKind::Message {
            let mut state = self.shared.state();
            if let Some(joined) = state.joined.get_mut(&communicator) {
                joined.doing = Some(*call);
            }
        }
    }

    /// The call of a communicator that this rank entered last.
    pub(crate) fn doing(&self, communicator: u32) -> Option<Call> {
        self.shared.state().joined.get(&communicator)?.doing
    }

    pub(crate) fn fault(&self) -> Option<DdpError> {
        self.shared.state().fault.clone()
    }

    /// A descriptor that becomes readable when the group has a fault.
    pub(crate) fn fault_signal(&self) -> BorrowedFd<'_> {
        self.shared.fault_end.as_fd()
    }

    /// Ends the group with this fault, unless it already has one. Returns the group's fault.
    pub(crate) fn fail(&self, fault: DdpError) -> DdpError {
        self.shared.fail(&mut self.shared.state(), fault)
    }

    /// Tells all ranks that this one no longer needs them. What they send is still read.
    pub(crate) fn say_goodbye(&self) {
        let goodbye = Frame::Goodbye.encode().expect("a name");
        for peer in self.shared.state().peers.values_mut() {
            peer.push(&goodbye);
        }
    }

    /// Waits until all ranks have said goodbye. When the time is over, or at a fault, returns the ranks that have not.
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

    /// The number of calls after which a rank left a communicator, if it said so. Waits a little for frames on their way.
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

    /// The `concerned` ranks that have sent nothing for longer than `long`.
    pub(crate) fn silent(&self, long: Duration, concerned: impl Fn(usize) -> bool) -> Vec<usize> {
        self.shared.state().silent(long, concerned)
    }

    /// Which of the `concerned` ranks hold up a call of a communicator, and an explanation. If none is known to, those of
    /// `waited_for` are blamed.
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
            let calls = calls.join(", ");
            let why = format!("alive, but not in this call yet ({calls}){IF_LATE}");
            return (late.into_iter().map(|(rank, _)| rank).collect(), why);
        }
        let why = match is_message {
            true => "alive, but the message did not come through",
            false => "alive and in the call, but too slow",
        };
        (waited_for.to_vec(), format!("{why}{IF_LATE}"))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.say_goodbye();
        self.shared.stop.store(true, Ordering::SeqCst);
        // If the socket's buffer is full, the thread wakes anyway.
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
        let abort = |fault: &DdpError| Frame::Abort(fault.clone()).encode();
        let (frame, fault) = match abort(&fault) {
            Some(frame) => (frame, fault),
            None => {
                let fault = in_words(fault, self.rank);
                (abort(&fault).expect("a number and a text"), fault)
            }
        };
        log::error!("burn-ddp: rank {}: {fault}", self.rank);
        // A fault that another rank has reported is passed on too: that rank may have connections to fewer ranks than this one.
        for peer in state.peers.values_mut() {
            peer.push(&frame);
        }
        launch::blame(self.rank, &fault);
        state.fault = Some(fault.clone());
        // Only fails if it is already closed, which is fine.
        let _ = self.fault_start.shutdown(std::net::Shutdown::Both);
        fault
    }
}

/// A fault that cannot be sent as it is, because it has an error of this machine's system or is too long, turned into text.
fn in_words(fault: DdpError, own: usize) -> DdpError {
    let (rank, mut reason) = match fault {
        DdpError::Aborted { rank, reason } => (rank, reason),
        fault => (own, fault.to_string()),
    };
    reason.truncate(reason.floor_char_boundary(WORDS));
    DdpError::Aborted { rank, reason }
}

impl State {
    /// The `concerned` ranks that have sent nothing for longer than `long`, without those that said goodbye.
    fn silent(&self, long: Duration, concerned: impl Fn(usize) -> bool) -> Vec<usize> {
        let silent = self.peers.iter().filter(|(rank, peer)| {
            let silence = self.looked.saturating_duration_since(peer.heard);
            concerned(**rank) && !peer.said_goodbye && silence > long
        });
        let mut silent: Vec<usize> = silent.map(|(rank, _)| *rank).collect();
        silent.sort_unstable();
        silent
    }

    /// Whether this rank belongs to a communicator, or may join it later: another rank may leave before this one has joined.
    fn needs(&self, communicator: u32) -> bool {
        communicator >= self.next || self.joined.contains_key(&communicator)
    }

    /// A call in which this rank and another disagree, if there is one: this rank's call, and the other's.
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
