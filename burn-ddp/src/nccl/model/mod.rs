//! NCCL over devices that are made of host memory, for ranks that are threads: the calls of nccl.h, with
//! what that and NCCL's documents say of them. Calls are only noted until a group ends, and are made later,
//! on the stream; they wait for all ranks, for ever where these do not make the same calls; a communicator
//! that is at work cannot be used; what is aborted leaves its peers alone with their calls.

mod calls;
mod device;
mod functions;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

pub(crate) use self::device::Block;
use self::{calls::Post, device::HostStream, functions::functions};
use super::{
    ffi::{Status, UniqueId},
    link::Link,
};
use crate::{DdpError, NcclError, collective::Collective};

/// `ncclResult_t`, as far as it is used here.
const CUDA_ERROR: Status = 1;
const INVALID_ARGUMENT: Status = 4;
const INVALID_USAGE: Status = 5;
const REMOTE_ERROR: Status = 6;

/// What goes wrong with a rank, once it has met the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Its device never gets to the next calls.
    Hangs,
    /// Its NCCL finds a connection broken in the next calls.
    Breaks,
}

#[derive(Default)]
struct Meeting {
    /// The number of ranks, and the devices of those that have come.
    size: usize,
    devices: HashMap<usize, usize>,
    /// Collective calls of all ranks, by their number.
    posts: HashMap<usize, Vec<Option<Post>>>,
    /// Messages on their way, by sender and receiver, and how many of them were taken.
    messages: HashMap<(usize, usize), VecDeque<Post>>,
    taken: HashMap<(usize, usize), usize>,
    troubles: HashMap<usize, Trouble>,
    /// Ranks whose communicator has not been destroyed or aborted, and those that aborted it.
    alive: HashSet<usize>,
    aborted: Vec<usize>,
    /// Groups of calls that were made.
    launches: usize,
}

/// Communicators of one identity.
#[derive(Default)]
struct Clique {
    meeting: Mutex<Meeting>,
    changed: Condvar,
}

impl Clique {
    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap()
    }
}

struct Member {
    clique: Arc<Clique>,
    rank: usize,
    device: usize,
    state: AtomicI32,
    problem: Mutex<String>,
    aborted: AtomicBool,
    finalized: AtomicBool,
    calls: AtomicUsize,
    joining: Mutex<Option<JoinHandle<()>>>,
}

impl Member {
    /// Waits for something that peers do, or fails when the communicator is aborted meanwhile.
    fn wait<R>(&self, mut found: impl FnMut(&mut Meeting) -> Option<R>) -> Result<R, Status> {
        let mut meeting = self.clique.meeting();
        loop {
            if self.aborted.load(Ordering::Acquire) {
                return Err(REMOTE_ERROR);
            }
            if let Some(found) = found(&mut meeting) {
                self.clique.changed.notify_all();
                return Ok(found);
            }
            meeting = self.clique.changed.wait(meeting).unwrap();
        }
    }

    fn fail(&self, status: Status, problem: String) {
        *self.problem.lock().unwrap() = problem;
        self.state.store(status, Ordering::Release);
    }
}

/// An identity, and what has become of its communicators.
#[derive(Clone)]
pub(crate) struct Model {
    id: UniqueId,
    clique: Arc<Clique>,
}

impl Model {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let mut id = [7; 128];
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        id[..8].copy_from_slice(&number.to_le_bytes());
        let clique = functions::clique(id);
        Self { id, clique }
    }

    /// Opens this rank's link, on a device.
    pub(crate) fn link(&self, call: &Collective<'_>, device: usize) -> Result<Link, DdpError> {
        let side = || Ok((functions(), Box::new(HostStream::new(device)) as Box<_>));
        Link::open(call, device, || Ok(self.id), side)
    }

    /// The same where rank 0 cannot make an identity.
    pub(crate) fn no_link(call: &Collective<'_>, reason: NcclError) -> DdpError {
        let side = || Err("nobody gets so far".into());
        let link = Link::open(call, 0, || Err(reason), side);
        link.map(drop).unwrap_err()
    }

    pub(crate) fn trouble(&self, rank: usize, trouble: Trouble) {
        self.clique.meeting().troubles.insert(rank, trouble);
    }

    /// How often ranks have entered NCCL.
    pub(crate) fn launches(&self) -> usize {
        self.clique.meeting().launches
    }

    /// Ranks whose communicator was neither destroyed nor aborted.
    pub(crate) fn alive(&self) -> usize {
        self.clique.meeting().alive.len()
    }

    /// Ranks that aborted their communicator, in their order.
    pub(crate) fn aborted(&self) -> Vec<usize> {
        let mut aborted = self.clique.meeting().aborted.clone();
        aborted.sort_unstable();
        aborted
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::nccl::{
        ffi::{DeviceCommunicator, Functions},
        found::nccl,
    };

    /// NVIDIA's own, where it is, takes the same arguments, and says what it lacks.
    #[test]
    fn the_real_library_wants_a_gpu() {
        let Ok(found) = nccl() else {
            eprintln!("skipped: no NCCL library");
            return;
        };
        if Path::new("/dev/nvidiactl").exists() {
            eprintln!("skipped: there is a GPU");
            return;
        }
        let functions = Functions::of(found.library()).unwrap();
        let (stream, id) = (Box::new(HostStream::new(0)), found.unique_id().unwrap());
        let joined = DeviceCommunicator::join(functions, stream, id, 0, 1);
        let problem = joined.map(drop).unwrap_err();
        assert!(problem.contains("cuda error"), "{problem}");
    }
}
