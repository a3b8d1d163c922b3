//! Which gradients there are on any rank: told in each step, or once where a static graph was promised.

use crate::{DdpError, ProcessGroup, ReduceOp};

/// What a rank says that breaks its promise.
pub(super) const NOT_STATIC: &str = "it has other gradients than in its first step, or in another order, though a static graph was promised";

/// Finds out which gradients any rank has: a 1 for each that is there, a 0 for each that is not.
pub(super) struct Presence {
    /// See [`DdpConfig::static_graph`](super::DdpConfig::static_graph).
    promised: bool,
    /// Those that this rank has in each step, once it had some.
    own: Option<Vec<u8>>,
    /// Those that any rank has, once all ranks had some.
    agreed: Option<Vec<u8>>,
}

impl Presence {
    pub(super) fn new(promised: bool) -> Self {
        Self {
            promised,
            own: None,
            agreed: None,
        }
    }

    /// Has the ranks tell each other once more, in a step in which one cannot be sure that all others do the same.
    pub(super) fn tell_again(&mut self) {
        self.agreed = None;
    }

    /// The gradients that any rank has. All ranks call this together.
    pub(super) fn agree(
        &mut self,
        group: &ProcessGroup,
        present: &[u8],
    ) -> Result<Vec<u8>, DdpError> {
        let mut anywhere = present.to_vec();
        if !self.promised {
            group.all_reduce(&mut anywhere, ReduceOp::Max)?;
            return Ok(anywhere);
        }
        // A rank without a batch has no gradients at all, which breaks no promise.
        let idle = !present.contains(&1);
        if !idle && *self.own.get_or_insert_with(|| present.to_vec()) != present {
            return Err(group.abort(NOT_STATIC));
        }
        if let Some(agreed) = &self.agreed {
            return Ok(agreed.clone());
        }
        anywhere.push(idle.into());
        group.all_reduce(&mut anywhere, ReduceOp::Max)?;
        if anywhere.pop() == Some(0) {
            self.agreed = Some(anywhere.clone());
        }
        Ok(anywhere)
    }
}
