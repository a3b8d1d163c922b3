//! A model of NCCL for tests, over devices in host memory and ranks that are threads. It has the functions of nccl.h, which
//! behave as nccl.h and NCCL's documentation say. Calls are only noted until a group ends, and are executed later,
//! on the stream. They wait for all ranks, forever if these do not make the same calls. A communicator
//! that is at work cannot be used. The peers of an aborted communicator keep waiting in their calls.

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

/// The values of `ncclResult_t` that are used here.
const CUDA_ERROR: Status = 1;
const INVALID_ARGUMENT: Status = 4;
const INVALID_USAGE: Status = 5;
const REMOTE_ERROR: Status = 6;

/// What goes wrong with a rank after it has met the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Its device never executes the next calls.
    Hangs,
    /// Its NCCL finds a connection broken in the next calls.
    Breaks,
    /// Its NCCL does not take the next calls.
    Refuses,
}

#[derive(Default)]
struct Meeting {
    /// The number of ranks, and the devices of the ranks that have come.
    size: usize,
    devices: HashMap<usize, usize>,
    /// The collective calls of all ranks, by call number.
    posts: HashMap<usize, Vec<Option<Post>>>,
    /// The messages on their way, by sender and receiver, and how many were received before.
    messages: HashMap<(usize, usize), VecDeque<Post>>,
    taken: HashMap<(usize, usize), usize>,
    troubles: HashMap<usize, Trouble>,
    /// The ranks whose communicator has not been destroyed or aborted, and the ranks that aborted it.
    alive: HashSet<usize>,
    aborted: Vec<usize>,
    /// The number of groups of calls that were made.
    launches: usize,
}

/// The communicators of one identity.
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
    /// Waits until `found` finds something that peers do. Fails if the communicator is aborted meanwhile.
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

/// An identity, and the state of its communicators.
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

    /// The error of opening a link where rank 0 cannot create an identity.
    pub(crate) fn no_link(call: &Collective<'_>, reason: NcclError) -> DdpError {
        let side = || Err("nobody gets so far".into());
        let link = Link::open(call, 0, || Err(reason), side);
        link.map(drop).unwrap_err()
    }

    pub(crate) fn trouble(&self, rank: usize, trouble: Trouble) {
        self.clique.meeting().troubles.insert(rank, trouble);
    }

    /// How often ranks have launched a group of calls.
    pub(crate) fn launches(&self) -> usize {
        self.clique.meeting().launches
    }

    /// The number of ranks whose communicator was neither destroyed nor aborted.
    pub(crate) fn alive(&self) -> usize {
        self.clique.meeting().alive.len()
    }

    /// The ranks that aborted their communicator, sorted.
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

    /// NVIDIA's library, if there is one, accepts the same arguments, and fails for lack of a GPU.
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
