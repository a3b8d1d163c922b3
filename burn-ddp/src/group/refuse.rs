//! Refuses invalid calls: tells the ranks whose call is valid, so that they do not wait.

use super::ProcessGroup;
use crate::{CallKind, DdpError, ElementType, Flaw, ReduceOp, collective::Collective};

impl ProcessGroup {
    /// Refuses a call. Ranks that make a valid call are told of the flaw; if all ranks make the same mistake,
    /// nothing happens to the group. The returned error says more than the other ranks are told.
    pub(crate) fn refuse(&self, kind: CallKind, flaw: Flaw, error: DdpError) -> DdpError {
        let _ = self.meet_over(kind, flaw);
        error
    }

    /// Meets all ranks in a call with this flaw.
    pub(super) fn meet_over(&self, kind: CallKind, flaw: Flaw) -> Result<(), DdpError> {
        let meet = |call: Collective<'_>| call.flawed(flaw).barrier();
        self.run((kind, ReduceOp::Sum, 0, 0), ElementType::U8, meet, || ())
    }

    /// Refuses to send a message to a rank, or to receive one from it. It still counts as a message, so that
    /// the numbers of both sides stay equal.
    pub(super) fn refuse_message(
        &self,
        peer: usize,
        sends: bool,
        flaw: Flaw,
        error: DdpError,
    ) -> DdpError {
        let call = self.message_call(ElementType::U8, 0, peer, sends);
        let _ = call.and_then(|(_turn, call)| {
            let call = call.flawed(flaw);
            match sends {
                true => call.send::<u8>(&[], peer),
                false => call.receive::<u8>(&mut [], peer),
            }
        });
        error
    }
}
