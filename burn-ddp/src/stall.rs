//! A warning about a call that has waited for long, before its time limit ends the job (as Horovod's stall check).

use std::{cell::Cell, time::Instant};

use crate::{
    Call,
    transport::{Deadline, Transport},
};

/// Watches a call. It warns once, when a fifth of the time limit is over.
pub(crate) struct Stall {
    began: Instant,
    told: Cell<bool>,
}

impl Stall {
    /// From now on.
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            told: Cell::new(false),
        }
    }

    /// Looks at the time: the call still waits for the ranks of `waited_for`.
    pub(crate) fn look(
        &self,
        transport: &dyn Transport,
        call: &Call,
        waited_for: &[usize],
        deadline: Deadline,
    ) {
        let waited = self.began.elapsed();
        let early = waited < deadline.after / 5;
        if early || waited_for.is_empty() || self.told.replace(true) {
            return;
        }
        let (ranks, why) = transport.blame(call, waited_for);
        log::warn!(
            "burn-ddp: {call} has waited for ranks {ranks:?} for {waited:.1?} of {:?}: {why}",
            deadline.after
        );
    }
}
