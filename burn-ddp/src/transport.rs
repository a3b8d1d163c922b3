//! The one primitive under all collectives: sending to some ranks while receiving from some.

use std::time::{Duration, Instant};

use crate::{Call, DdpError, Element, ReduceOp, element::combine_slices};

/// A payload to send to a rank.
pub(crate) struct Outgoing<'a> {
    pub(crate) peer: usize,
    pub(crate) payload: &'a [u8],
    /// The call that the payload belongs to, if not that of the exchange.
    pub(crate) call: Option<Call>,
}

impl<'a> Outgoing<'a> {
    pub(crate) fn new<T: Element>(peer: usize, payload: &'a [T]) -> Self {
        Self {
            peer,
            payload: bytemuck::cast_slice(payload),
            call: None,
        }
    }
}

/// An operator, and a function that combines received bytes into those already there.
pub(crate) type Fold = (ReduceOp, fn(ReduceOp, &mut [u8], &[u8]));

/// A payload to receive from a rank: it is copied to `into`, or combined with the data there.
pub(crate) struct Incoming<'a> {
    pub(crate) peer: usize,
    pub(crate) into: &'a mut [u8],
    pub(crate) fold: Option<Fold>,
    /// The size of an element in bytes: `fold` always gets whole elements.
    pub(crate) size: usize,
    /// The call that the payload must belong to, if not that of the exchange.
    pub(crate) call: Option<Call>,
}

impl<'a> Incoming<'a> {
    pub(crate) fn copy<T: Element>(peer: usize, into: &'a mut [T]) -> Self {
        Self {
            peer,
            into: bytemuck::cast_slice_mut(into),
            fold: None,
            size: size_of::<T>(),
            call: None,
        }
    }

    pub(crate) fn fold<T: Element>(peer: usize, op: ReduceOp, into: &'a mut [T]) -> Self {
        Self {
            fold: Some((op, fold_bytes::<T>)),
            ..Self::copy(peer, into)
        }
    }
}

fn fold_bytes<T: Element>(op: ReduceOp, into: &mut [u8], other: &[u8]) {
    combine_slices::<T>(
        op,
        bytemuck::cast_slice_mut(into),
        bytemuck::cast_slice(other),
    );
}

/// A hundred years.
pub(crate) const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// What the explanation of a timeout by ranks that are alive ends with.
pub(crate) const IF_LATE: &str = "; if it has reason to be late, raise the limit (`ProcessGroup::with_timeout`, `BURN_DDP_TIMEOUT`)";

/// A time limit: when it ends, and how long it is, for error messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    pub(crate) at: Instant,
    pub(crate) after: Duration,
    /// How long a rank may show no sign of life before the limit ends early.
    pub(crate) silence: Duration,
}

impl Deadline {
    pub(crate) fn after(after: Duration) -> Self {
        Self {
            // An `Instant` cannot be arbitrarily far away, so an endless limit ends after a hundred years.
            at: Instant::now() + after.min(FOREVER),
            after,
            silence: after,
        }
    }

    /// The same limit, which ends early if a rank shows no sign of life for `silence`.
    pub(crate) fn with_silence(&self, silence: Duration) -> Self {
        Self {
            silence: silence.min(self.after),
            ..*self
        }
    }

    /// The same limit, moved later.
    pub(crate) fn later(&self, by: Duration) -> Self {
        Self {
            at: self.at + by,
            ..*self
        }
    }

    /// The remaining time, or `None` if the limit is over.
    pub(crate) fn left(&self) -> Option<Duration> {
        let left = self.at.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }
}

/// Moves the messages of one communicator.
///
/// Calls on one transport are made one at a time. The first fault (see [`DdpError::is_fault`]) ends the
/// transport: every later call, on every rank, returns that fault.
pub(crate) trait Transport: Send + Sync {
    /// Sends and receives all payloads at once, in any order: at most one to and one from each peer. Each
    /// received payload must belong to `call`, or to the call that its `Incoming` names.
    fn exchange(
        &self,
        call: &Call,
        outgoing: Vec<Outgoing<'_>>,
        incoming: Vec<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<(), DdpError>;

    /// A separate transport between `members`, which include this rank and keep their numbers. `id` is the same
    /// on all of them, and higher than the ids of all communicators that any of them has had.
    fn duplicate(
        &self,
        id: u32,
        members: &[usize],
        deadline: Deadline,
    ) -> Result<Box<dyn Transport>, DdpError>;

    /// Which ranks, by their numbers in the whole job, hold up a call that waits for these members, and what is
    /// known about them.
    fn blame(&self, call: &Call, waited_for: &[usize]) -> (Vec<usize>, String);

    /// The fault of a call that waits for a member which has shown no sign of life for longer than the deadline
    /// allows. `None` if there is no such member, or if the transport cannot tell.
    fn silent(&self, call: &Call, waited_for: &[usize], deadline: Deadline) -> Option<DdpError> {
        let _ = (call, waited_for, deadline);
        None
    }

    /// A member's rank in the whole job, which error messages use.
    fn number(&self, member: usize) -> usize {
        member
    }

    /// Ends the group on all ranks. Returns the fault that ended it, which may be an earlier one.
    fn fail(&self, fault: DdpError) -> DdpError;

    /// The fault that ended the group, if one did.
    fn fault(&self) -> Option<DdpError>;
}
