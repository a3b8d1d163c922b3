//! The steps that every call goes through: its turn, its number, its deadline and its counters.

use std::{collections::HashMap, sync::atomic::Ordering, time::Instant};

use super::{
    Counters, ProcessGroup,
    order::{Obstacle, Place},
};
use crate::{
    Backend, Call, CallKind, DdpError, ElementType, ReduceOp, collective::Collective,
    transport::Deadline,
};

/// The number of calls made: collective ones, and messages to and from each rank.
#[derive(Default)]
pub(super) struct Sequences {
    collective: u64,
    sent: HashMap<usize, u64>,
    received: HashMap<usize, u64>,
}

impl Sequences {
    /// Takes the number of the next message to `rank`.
    pub(super) fn next_to(&mut self, rank: usize) -> u64 {
        let sent = self.sent.entry(rank).or_default();
        *sent += 1;
        *sent - 1
    }

    /// Takes the number of the next message from `rank`.
    pub(super) fn next_from(&mut self, rank: usize) -> u64 {
        let received = self.received.entry(rank).or_default();
        *received += 1;
        *received - 1
    }
}

/// The turn of a call. Dropping it counts the time that it took, and ends it.
pub(super) struct Turn<'a> {
    _place: Place,
    counters: &'a Counters,
    start: Instant,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let nanoseconds = self.start.elapsed().as_nanos() as u64;
        let total = &self.counters.nanoseconds;
        total.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

impl ProcessGroup {
    /// Whether calls need no communication. A single rank that requests NCCL is treated like a larger group: it
    /// gets NCCL, or an error that says what is missing.
    pub(super) fn is_alone(&self) -> bool {
        self.inner.world_size == 1 && self.inner.settings.backend != Backend::Nccl
    }

    /// Makes a collective call: `alone` if this is the only rank, `together` otherwise.
    pub(super) fn run<R>(
        &self,
        what: (CallKind, ReduceOp, usize, usize),
        dtype: ElementType,
        together: impl FnOnce(Collective<'_>) -> Result<R, DdpError>,
        alone: impl FnOnce() -> R,
    ) -> Result<R, DdpError> {
        let place = self.inner.order.take();
        self.run_at(place, what, dtype, together, alone)
    }

    /// The same, at a place in the queue that was taken earlier.
    pub(super) fn run_at<R>(
        &self,
        place: Place,
        (kind, op, len, root): (CallKind, ReduceOp, usize, usize),
        dtype: ElementType,
        together: impl FnOnce(Collective<'_>) -> Result<R, DdpError>,
        alone: impl FnOnce() -> R,
    ) -> Result<R, DdpError> {
        let valid = self.check_arguments(kind, op, len, root, dtype);
        let call = self.call_at(place, |sequences| {
            sequences.collective += 1;
            Call {
                sequence: sequences.collective - 1,
                kind,
                dtype,
                op,
                len: len as u64,
                root: root as u32,
                by_nccl: false,
                flaw: None,
            }
        })?;
        let Some((_turn, call)) = call else {
            return valid.map(|()| alone());
        };
        if let Err(error) = valid {
            // The call itself shows the mistake: either all ranks make it and get this error, or ranks with
            // other arguments notice the difference.
            return call.barrier().and(Err(error));
        }
        together(call)
    }

    /// Waits for the place's turn, numbers the call and starts its clock. `None` if this rank is alone.
    pub(super) fn call_at(
        &self,
        place: Place,
        number: impl FnOnce(&mut Sequences) -> Call,
    ) -> Result<Option<(Turn<'_>, Collective<'_>)>, DdpError> {
        let inner = &*self.inner;
        let number = || number(&mut inner.sequences.lock().expect("no panic under lock"));
        match place.wait(self.timeout, || inner.transport.fault()) {
            Ok(()) => {}
            Err(Obstacle::Fault(fault)) => return Err(fault),
            Err(Obstacle::NotBegun) => return Err(self.stuck(number())),
        }
        inner.counters.calls.fetch_add(1, Ordering::Relaxed);
        if let Some(fault) = inner.transport.fault() {
            return Err(fault);
        }
        if self.is_alone() {
            return Ok(None);
        }
        let turn = Turn {
            _place: place,
            counters: &inner.counters,
            start: Instant::now(),
        };
        let call = number();
        let collective = Collective {
            transport: &*inner.transport,
            rank: inner.rank,
            world_size: inner.world_size,
            call,
            deadline: Deadline::after(self.timeout).with_silence(inner.settings.timeout),
        };
        Ok(Some((turn, collective)))
    }

    /// The next message to or from a rank.
    pub(super) fn message_call(
        &self,
        dtype: ElementType,
        len: usize,
        peer: usize,
        sends: bool,
    ) -> Result<(Turn<'_>, Collective<'_>), DdpError> {
        let place = self.inner.order.take();
        let call = self.call_at(place, |sequences| {
            let number = match sends {
                true => sequences.next_to(peer),
                false => sequences.next_from(peer),
            };
            message(dtype, number, len)
        })?;
        Ok(call.expect("there is another rank"))
    }

    /// Ends the job because of a call whose turn does not come.
    fn stuck(&self, call: Call) -> DdpError {
        self.inner.transport.fail(DdpError::Timeout {
            ranks: vec![self.inner.job_rank],
            call,
            after: self.timeout,
            why: "an earlier call of this rank has not begun, for its tensor is not there yet; where that waits for this \
                  call, as in a SyncBatchNorm on a layered device, one of them needs a group of its own (`duplicate`)"
                .into(),
        })
    }

    pub(super) fn check_rank(&self, rank: usize) -> Result<(), DdpError> {
        match rank < self.world_size() {
            true => Ok(()),
            false => Err(DdpError::InvalidArgument(format!(
                "rank {rank}; expected one below {}",
                self.world_size()
            ))),
        }
    }

    pub(super) fn check_peer(&self, rank: usize) -> Result<(), DdpError> {
        self.check_rank(rank)?;
        match rank != self.rank() {
            true => Ok(()),
            false => Err(DdpError::InvalidArgument(format!(
                "rank {rank} cannot exchange messages with itself"
            ))),
        }
    }

    /// Checks the arguments of a collective call that its messages carry.
    fn check_arguments(
        &self,
        kind: CallKind,
        op: ReduceOp,
        len: usize,
        root: usize,
        dtype: ElementType,
    ) -> Result<(), DdpError> {
        use CallKind::{AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter};
        match kind {
            Broadcast | Reduce => self.check_rank(root)?,
            AllToAll | ReduceScatter => self.check_parts(len)?,
            _ => {}
        }
        let reduces = matches!(kind, AllReduce | Reduce | ReduceScatter);
        match reduces && op == ReduceOp::Mean && !dtype.is_float() {
            false => Ok(()),
            true => Err(DdpError::InvalidArgument(format!(
                "the mean of {dtype} values; take their sum"
            ))),
        }
    }

    pub(super) fn check_parts(&self, len: usize) -> Result<(), DdpError> {
        match len.is_multiple_of(self.world_size()) {
            true => Ok(()),
            false => Err(DdpError::InvalidArgument(format!(
                "{len} elements; expected a multiple of the world size, {}",
                self.world_size()
            ))),
        }
    }
}

/// A message between two ranks, numbered among those from one to the other.
pub(super) fn message(dtype: ElementType, sequence: u64, len: usize) -> Call {
    Call {
        sequence,
        kind: CallKind::Message,
        dtype,
        op: ReduceOp::Sum,
        len: len as u64,
        root: 0,
        by_nccl: false,
        flaw: None,
    }
}

#[cfg(test)]
mod tests;
