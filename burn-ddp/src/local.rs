//! The transport between threads of one process.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    time::Duration,
};

use crate::{
    Backend, Call, CallKind, DdpError, ProcessGroup, environment,
    group::{Settings, TIMEOUT},
    transport::{Deadline, IF_LATE, Incoming, Outgoing, Transport},
};

/// Makes process groups whose ranks are threads of one process.
///
/// They behave like other process groups, with the same collectives, checks and errors. (One difference: a rank
/// that only sends, as in a broadcast, never waits for the receiver; its data is kept in memory.) For training, each
/// thread must create its own model, because clones of a model share their running statistics.
///
/// ```
/// use burn_ddp::{LocalGroup, ReduceOp};
///
/// std::thread::scope(|scope| {
///     for group in LocalGroup::new(3) {
///         scope.spawn(move || {
///             let mut data = [group.rank() as f32, 1.0];
///             group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
///             assert_eq!(data, [3.0, 3.0]);
///         });
///     }
/// });
/// ```
#[derive(Debug)]
pub struct LocalGroup;

impl LocalGroup {
    /// One group handle for each of `world_size` ranks, in rank order; give each to its own thread. The time limit
    /// of calls is `BURN_DDP_TIMEOUT` (seconds), or 10 minutes; [`ProcessGroup::with_timeout`] sets another.
    ///
    /// # Panics
    ///
    /// Panics if `world_size` is 0, or if `BURN_DDP_TIMEOUT` is not a valid number of seconds.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(world_size: usize) -> Vec<ProcessGroup> {
        Self::with_backend(world_size, Backend::default())
    }

    /// Like [`new`](Self::new), with a choice of how tensors travel: for several GPUs in one process.
    ///
    /// # Panics
    ///
    /// As [`new`](Self::new).
    pub fn with_backend(world_size: usize, backend: Backend) -> Vec<ProcessGroup> {
        let timeout = environment::process().timeout();
        let timeout = timeout.unwrap_or_else(|error| panic!("{error}"));
        Self::with_settings(world_size, backend, timeout.unwrap_or(TIMEOUT))
    }

    pub(crate) fn with_settings(
        world_size: usize,
        backend: Backend,
        timeout: Duration,
    ) -> Vec<ProcessGroup> {
        assert!(world_size > 0, "a group has at least one rank");
        let hub = Arc::new(Hub::default());
        (0..world_size)
            .map(|rank| {
                let transport = Box::new(Local::new(&hub, rank, 0, (0..world_size).collect()));
                let settings = Settings::new(timeout, backend);
                ProcessGroup::new(transport, rank, world_size, rank, settings)
            })
            .collect()
    }
}

/// A payload, and the call that it belongs to.
struct Message {
    call: Call,
    len: usize,
    /// Aligned for all element types.
    words: Vec<u64>,
}

impl Message {
    fn new(call: Call, payload: &[u8]) -> Self {
        let len = payload.len();
        let mut words = vec![0; len.div_ceil(size_of::<u64>())];
        bytemuck::cast_slice_mut(&mut words)[..len].copy_from_slice(payload);
        Self { call, len, words }
    }

    fn payload(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

/// The state of a communicator, kept until all its members have left.
#[derive(Default)]
struct Communicator {
    /// By sender and receiver.
    messages: HashMap<(usize, usize), VecDeque<Message>>,
    /// The latest call that each rank has entered.
    doing: HashMap<usize, Call>,
    left: HashSet<usize>,
}

impl Communicator {
    fn calls(&self, rank: usize) -> u64 {
        self.doing.get(&rank).map_or(0, |call| call.sequence + 1)
    }
}

/// The id and the ranks of a communicator. Communicators of different ranks may have the same id.
type Key = (u32, Arc<[usize]>);

#[derive(Default)]
struct State {
    communicators: HashMap<Key, Communicator>,
    fault: Option<DdpError>,
}

impl State {
    fn communicator(&mut self, key: &Key) -> &mut Communicator {
        self.communicators.entry(key.clone()).or_default()
    }
}

#[derive(Default)]
struct Hub {
    state: Mutex<State>,
    changed: Condvar,
}

impl Hub {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under lock")
    }
}

struct Local {
    hub: Arc<Hub>,
    rank: usize,
    communicator: Key,
}

impl Local {
    /// `members` are the ranks of the communicator, in any order.
    fn new(hub: &Arc<Hub>, rank: usize, id: u32, mut members: Vec<usize>) -> Self {
        members.sort_unstable();
        Self {
            hub: hub.clone(),
            rank,
            communicator: (id, members.into()),
        }
    }

    /// Which ranks hold up a call, and why: those that are not in it yet, if any, since the ranks that it waits for may wait for
    /// these. Messages between two ranks are numbered apart from collective calls, so the calls that a rank has made say nothing
    /// about its messages.
    fn judge(
        &self,
        communicator: &Communicator,
        call: &Call,
        waited_for: &[usize],
    ) -> (Vec<usize>, String) {
        let (ranks, why) = if call.kind == CallKind::Message {
            (waited_for.to_vec(), "the message did not come")
        } else {
            let (_, members) = &self.communicator;
            let others = members.iter().copied().filter(|rank| *rank != self.rank);
            let is_late = |rank: &usize| communicator.calls(*rank) <= call.sequence;
            let late: Vec<usize> = others.filter(is_late).collect();
            match late.is_empty() {
                true => (waited_for.to_vec(), "in the call, but too slow"),
                false => (late, "not in this call yet"),
            }
        };
        (ranks, format!("{why}{IF_LATE}"))
    }

    /// Copies or combines a received message, if it is the expected one.
    fn take_in(
        &self,
        call: &Call,
        incoming: Incoming<'_>,
        message: &Message,
    ) -> Result<(), DdpError> {
        let call = incoming.call.unwrap_or(*call);
        if message.call != call || message.len != incoming.into.len() {
            return Err(self.fail(DdpError::Diverged {
                rank: self.rank,
                call,
                other: incoming.peer,
                other_call: message.call,
                shapes: None,
            }));
        }
        match incoming.fold {
            None => incoming.into.copy_from_slice(message.payload()),
            Some((op, fold)) => fold(op, incoming.into, message.payload()),
        }
        Ok(())
    }

    fn record(&self, state: &mut State, fault: DdpError) -> DdpError {
        let fault = state.fault.get_or_insert(fault).clone();
        self.hub.changed.notify_all();
        fault
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let mut state = self.hub.state();
        let communicator = state.communicator(&self.communicator);
        communicator.left.insert(self.rank);
        if communicator.left.len() == self.communicator.1.len() {
            state.communicators.remove(&self.communicator);
        }
        self.hub.changed.notify_all();
    }
}

impl Transport for Local {
    fn exchange(
        &self,
        call: &Call,
        outgoing: Vec<Outgoing<'_>>,
        mut incoming: Vec<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<(), DdpError> {
        // Copy outside the lock, on which all other ranks would have to wait.
        let messages = outgoing.into_iter().map(|outgoing| {
            let call = outgoing.call.unwrap_or(*call);
            (outgoing.peer, Message::new(call, outgoing.payload))
        });
        let messages: Vec<(usize, Message)> = messages.collect();
        let mut state = self.hub.state();
        let communicator = state.communicator(&self.communicator);
        if call.kind != CallKind::Message {
            communicator.doing.insert(self.rank, *call);
            // If all ranks only receive, no message shows that their calls differ.
            let mut others = communicator.doing.iter();
            if let Some((other, theirs)) = others.find(|(_, theirs)| theirs.excludes(call)) {
                let fault = DdpError::Diverged {
                    rank: self.rank,
                    call: *call,
                    other: *other,
                    other_call: *theirs,
                    shapes: None,
                };
                return Err(self.record(&mut state, fault));
            }
        }
        for (peer, message) in messages {
            let queue = communicator.messages.entry((self.rank, peer));
            queue.or_default().push_back(message);
        }
        self.hub.changed.notify_all();
        loop {
            let communicator = state.communicator(&self.communicator);
            let mut came = Vec::new();
            let mut waiting = Vec::new();
            for incoming in incoming {
                let queue = communicator.messages.get_mut(&(incoming.peer, self.rank));
                match queue.and_then(VecDeque::pop_front) {
                    Some(message) => came.push((incoming, message)),
                    None => waiting.push(incoming),
                }
            }
            incoming = waiting;
            if !came.is_empty() {
                drop(state);
                for (incoming, message) in came {
                    self.take_in(call, incoming, &message)?;
                }
                state = self.hub.state();
                continue;
            }
            if incoming.is_empty() {
                return Ok(());
            }
            if let Some(fault) = &state.fault {
                return Err(fault.clone());
            }
            let communicator = state.communicator(&self.communicator);
            let waited_for: Vec<usize> = incoming.iter().map(|it| it.peer).collect();
            let mut gone = waited_for.iter().copied();
            let fault = if let Some(rank) = gone.find(|rank| communicator.left.contains(rank)) {
                DdpError::RankLeft {
                    rank,
                    calls: communicator.calls(rank),
                    call: *call,
                }
            } else if let Some(left) = deadline.left() {
                let waited = self.hub.changed.wait_timeout(state, left);
                state = waited.expect("no panic under lock").0;
                continue;
            } else {
                let (ranks, why) = self.judge(communicator, call, &waited_for);
                DdpError::Timeout {
                    ranks,
                    call: *call,
                    after: deadline.after,
                    why,
                }
            };
            return Err(self.record(&mut state, fault));
        }
    }

    fn duplicate(
        &self,
        id: u32,
        members: &[usize],
        _deadline: Deadline,
    ) -> Result<Box<dyn Transport>, DdpError> {
        Ok(Box::new(Self::new(
            &self.hub,
            self.rank,
            id,
            members.to_vec(),
        )))
    }

    fn blame(&self, call: &Call, waited_for: &[usize]) -> (Vec<usize>, String) {
        let mut state = self.hub.state();
        self.judge(state.communicator(&self.communicator), call, waited_for)
    }

    fn fail(&self, fault: DdpError) -> DdpError {
        self.record(&mut self.hub.state(), fault)
    }

    fn fault(&self) -> Option<DdpError> {
        self.hub.state().fault.clone()
    }
}

#[cfg(test)]
pub(crate) mod tests;
