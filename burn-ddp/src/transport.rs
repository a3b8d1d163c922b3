//! The one primitive under all collectives: send to some ranks while receiving from some.

use std::time::{Duration, Instant};

use crate::{Call, DdpError, Element, ReduceOp, element::combine_slices};

/// A payload to send to a rank.
pub(crate) struct Outgoing<'a> {
    pub(crate) peer: usize,
    pub(crate) payload: &'a [u8],
    /// What it belongs to, if not to the call of the exchange.
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

/// Combines received bytes into those already there, in one way.
pub(crate) type Fold = (ReduceOp, fn(ReduceOp, &mut [u8], &[u8]));

/// A payload to receive from a rank: copied to `into`, or combined with what is there.
pub(crate) struct Incoming<'a> {
    pub(crate) peer: usize,
    pub(crate) into: &'a mut [u8],
    pub(crate) fold: Option<Fold>,
    /// Bytes of an element: `fold` gets whole elements.
    pub(crate) size: usize,
    /// What it must belong to, if not to the call of the exchange.
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

/// A time limit: when it ends and how long it was, for the error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    pub(crate) at: Instant,
    pub(crate) after: Duration,
    /// How long a rank may give no sign of life meanwhile.
    pub(crate) silence: Duration,
}

impl Deadline {
    pub(crate) fn after(after: Duration) -> Self {
        Self {
            // No clock reaches the end of a limit that is none.
            at: Instant::now() + after.min(FOREVER),
            after,
            silence: after,
        }
    }

    /// The same limit, that ends earlier where a rank gives no sign of life for so long.
    pub(crate) fn with_silence(&self, silence: Duration) -> Self {
        Self {
            silence: silence.min(self.after),
            ..*self
        }
    }

    /// The same limit, that much later.
    pub(crate) fn later(&self, by: Duration) -> Self {
        Self {
            at: self.at + by,
            ..*self
        }
    }

    /// What is left, or `None` when it is over.
    pub(crate) fn left(&self) -> Option<Duration> {
        let left = self.at.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }
}

/// Moves the messages of one communicator.
///
/// Calls on one transport are made one at a time. The first fault (see
/// [`DdpError::is_fault`]) ends it: every later call, on every rank, returns that fault.
pub(crate) trait Transport: Send + Sync {
    /// Sends and receives, all at once and in any order. At most one payload goes to and comes
    /// from each peer. Each received payload must belong to the same `call`, or to the one named with it.
    fn exchange(
        &self,
        call: &Call,
        outgoing: Vec<Outgoing<'_>>,
        incoming: Vec<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<(), DdpError>;

    /// A transport of its own between `members`, of which this rank is one; they keep their
    /// numbers. `id` is the same on all of them, and higher than any that one of them has had.
    fn duplicate(
        &self,
        id: u32,
        members: &[usize],
        deadline: Deadline,
    ) -> Result<Box<dyn Transport>, DdpError>;

    /// Which ranks, by their numbers in the whole job, hold up a call that waits for these members, and
    /// what is known of them.
    fn blame(&self, call: &Call, waited_for: &[usize]) -> (Vec<usize>, String);

    /// The fault of a call that waits for a member which has given no sign of life for longer than its deadline has it.
    /// `None` where all have, or there is no telling.
    fn silent(&self, call: &Call, waited_for: &[usize], deadline: Deadline) -> Option<DdpError> {
        let _ = (call, waited_for, deadline);
        None
    }

    /// A member's number in the whole job, by which faults name it.
    fn number(&self, member: usize) -> usize {
        member
    }

    /// Ends the group on all ranks; returns the fault that did, which may be an earlier one.
    fn fail(&self, fault: DdpError) -> DdpError;

    /// The fault that ended the group, if one did.
    fn fault(&self) -> Option<DdpError>;
}
