//! Calls that a rank cannot make: those that make them otherwise are told, and do not wait for it.

use super::ProcessGroup;
use crate::{CallKind, DdpError, ElementType, Flaw, ReduceOp, collective::Collective};

impl ProcessGroup {
    /// Refuses a call. Ranks that make it otherwise are told of the flaw; where all have the same, nothing has
    /// happened. This rank's own error says more than what the others are told.
    pub(crate) fn refuse(&self, kind: CallKind, flaw: Flaw, error: DdpError) -> DdpError {
        let _ = self.meet_over(kind, flaw);
        error
    }

    /// Meets all ranks in a call with a flaw.
    pub(super) fn meet_over(&self, kind: CallKind, flaw: Flaw) -> Result<(), DdpError> {
        let meet = |call: Collective<'_>| call.flawed(flaw).barrier();
        self.run((kind, ReduceOp::Sum, 0, 0), ElementType::U8, meet, || ())
    }

    /// Refuses to send a message to a rank, or to receive one from it. It counts as one, so that the next is
    /// the next on both sides.
    pub(super) fn refuse_message(
        &self,
        peer: usize,
        sends: bool,
        flaw: Flaw,
        error: DdpError,
    ) -> DdpError {
        let call = self.message_call(ElementType::U8, 0, peer, sends);
        let _ = call.and_then(|(_place, call)| {
            let call = call.flawed(flaw);
            match sends {
                true => call.send::<u8>(&[], peer),
                false => call.receive::<u8>(&mut [], peer),
            }
        });
        error
    }
}
