//! The transport between threads of one process.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    time::Duration,
};

use crate::{
    Backend, Call, CallKind, DdpError, ProcessGroup, environment,
    group::{Settings, TIMEOUT},
    transport::{Deadline, Incoming, Outgoing, Transport},
};

/// Makes process groups whose ranks are threads of one process.
///
/// They do all that other process groups do: the same collectives, checks and errors.
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
    /// One group handle for each of `world_size` ranks, in their order, to be handed to as many
    /// threads. The time limit of calls is `BURN_DDP_TIMEOUT` (seconds), or 5 minutes;
    /// [`ProcessGroup::with_timeout`] sets another.
    ///
    /// # Panics
    ///
    /// Panics if `world_size` is 0, or `BURN_DDP_TIMEOUT` is no number of seconds.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(world_size: usize) -> Vec<ProcessGroup> {
        Self::with_backend(world_size, Backend::default())
    }

    /// The same, with a choice of how tensors travel: for several GPUs in one process.
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
                let transport = Box::new(Local::new(&hub, rank, 0));
                let settings = Settings::new(timeout, backend);
                ProcessGroup::new(transport, rank, world_size, rank, settings)
            })
            .collect()
    }
}

/// A message, with the call it belongs to.
type Message = (Call, Vec<u8>);
/// Communicator, sender, receiver.
type Route = (u32, usize, usize);

#[derive(Default)]
struct State {
    messages: HashMap<Route, VecDeque<Message>>,
    /// Calls entered, by communicator and rank.
    progress: HashMap<(u32, usize), u64>,
    /// Handles that each rank still holds.
    handles: HashMap<usize, usize>,
    fault: Option<DdpError>,
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
    communicator: u32,
}

impl Local {
    fn new(hub: &Arc<Hub>, rank: usize, communicator: u32) -> Self {
        *hub.state().handles.entry(rank).or_insert(0) += 1;
        Self {
            hub: hub.clone(),
            rank,
            communicator,
        }
    }

    /// Which of the ranks that a call waits for are to blame. Messages between two ranks are numbered apart
    /// from the calls of all, and say nothing of these.
    fn judge(&self, state: &State, call: &Call, waited_for: &[usize]) -> (Vec<usize>, String) {
        if call.kind == CallKind::Message {
            return (waited_for.to_vec(), "the message did not come".into());
        }
        let is_late = |rank: &&usize| {
            let entered = state.progress.get(&(self.communicator, **rank));
            entered.is_none_or(|entered| *entered <= call.sequence)
        };
        let late: Vec<usize> = waited_for.iter().filter(is_late).copied().collect();
        match late.is_empty() {
            true => (waited_for.to_vec(), "in the call, but too slow".into()),
            false => (late, "not in this call yet".into()),
        }
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
        if let Some(handles) = state.handles.get_mut(&self.rank) {
            *handles -= 1;
        }
        if std::thread::panicking() {
            let rank = self.rank;
            let reason = "it panicked".into();
            self.record(&mut state, DdpError::Aborted { rank, reason });
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
        let mut state = self.hub.state();
        if call.kind != CallKind::Message {
            let entered = (self.communicator, self.rank);
            state.progress.insert(entered, call.sequence + 1);
        }
        for outgoing in outgoing {
            let route = (self.communicator, self.rank, outgoing.peer);
            let queue = state.messages.entry(route).or_default();
            let call = outgoing.call.unwrap_or(*call);
            queue.push_back((call, outgoing.payload.to_vec()));
        }
        self.hub.changed.notify_all();
        loop {
            let mut diverged = None;
            incoming.retain_mut(|incoming| {
                let route = (self.communicator, incoming.peer, self.rank);
                let queue = state.messages.get_mut(&route);
                let Some((theirs, payload)) = queue.and_then(VecDeque::pop_front) else {
                    return true;
                };
                let call = incoming.call.unwrap_or(*call);
                if theirs != call || payload.len() != incoming.into.len() {
                    diverged = Some((call, incoming.peer, theirs));
                    return false;
                }
                match incoming.fold {
                    None => incoming.into.copy_from_slice(&payload),
                    Some(fold) => {
                        // A byte vector is not aligned for all element types.
                        let mut aligned = vec![0u64; payload.len().div_ceil(8)];
                        let aligned: &mut [u8] = bytemuck::cast_slice_mut(&mut aligned);
                        aligned[..payload.len()].copy_from_slice(&payload);
                        fold(call.op, incoming.into, &aligned[..payload.len()]);
                    }
                }
                false
            });
            if let Some((call, other, other_call)) = diverged {
                let fault = DdpError::Diverged {
                    rank: self.rank,
                    call,
                    other,
                    other_call,
                    shapes: None,
                };
                return Err(self.record(&mut state, fault));
            }
            if incoming.is_empty() {
                return Ok(());
            }
            if let Some(fault) = &state.fault {
                return Err(fault.clone());
            }
            let gone = incoming
                .iter()
                .map(|incoming| incoming.peer)
                .find(|peer| state.handles.get(peer).is_none_or(|handles| *handles == 0));
            if let Some(rank) = gone {
                let fault = DdpError::RankLeft { rank, call: *call };
                return Err(self.record(&mut state, fault));
            }
            let Some(left) = deadline.left() else {
                let waited_for: Vec<usize> = incoming.iter().map(|it| it.peer).collect();
                let (ranks, why) = self.judge(&state, call, &waited_for);
                let fault = DdpError::Timeout {
                    ranks,
                    call: *call,
                    after: deadline.after,
                    why,
                };
                return Err(self.record(&mut state, fault));
            };
            let waited = self.hub.changed.wait_timeout(state, left);
            state = waited.expect("no panic under lock").0;
        }
    }

    fn duplicate(
        &self,
        id: u32,
        _members: &[usize],
        _deadline: Deadline,
    ) -> Result<Box<dyn Transport>, DdpError> {
        Ok(Box::new(Self::new(&self.hub, self.rank, id)))
    }

    fn blame(&self, call: &Call, waited_for: &[usize]) -> (Vec<usize>, String) {
        self.judge(&self.hub.state(), call, waited_for)
    }

    fn fail(&self, fault: DdpError) -> DdpError {
        self.record(&mut self.hub.state(), fault)
    }

    fn fault(&self) -> Option<DdpError> {
        self.hub.state().fault.clone()
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::{ElementType, ReduceOp};

    fn call(kind: CallKind, sequence: u64) -> Call {
        Call {
            sequence,
            kind,
            dtype: ElementType::U8,
            op: ReduceOp::Sum,
            len: 0,
            root: 0,
            by_nccl: false,
            flaw: None,
        }
    }

    #[test]
    fn messages_say_nothing_of_the_calls_of_all() {
        let hub = Arc::new(Hub::default());
        let ranks = [0, 1, 2].map(|rank| Local::new(&hub, rank, 0));
        let short = Deadline::after(Duration::from_millis(50));
        // Rank 1 has sent many messages, and made no call of all.
        for sequence in 0..5 {
            let outgoing = vec![Outgoing::new::<u8>(2, &[])];
            let message = call(CallKind::Message, sequence);
            ranks[1]
                .exchange(&message, outgoing, vec![], short)
                .unwrap();
        }
        let barrier = call(CallKind::Barrier, 0);
        let (late, why) = ranks[0].blame(&barrier, &[1]);
        assert_eq!((&late[..], &why[..]), (&[1][..], "not in this call yet"));

        let incoming = vec![Incoming::copy::<u8>(1, &mut [])];
        let message = call(CallKind::Message, 0);
        let error = ranks[0].exchange(&message, vec![], incoming, short);
        let Err(DdpError::Timeout { ranks, why, .. }) = error else {
            panic!("nobody sent it");
        };
        assert_eq!(
            (&ranks[..], &why[..]),
            (&[1][..], "the message did not come")
        );
    }
}
