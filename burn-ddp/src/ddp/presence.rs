//! Finds out which gradients any rank has: in each step, or once if a static graph was promised.

use crate::{DdpError, ProcessGroup, ReduceOp};

/// The reason for which a rank that breaks its promise aborts.
pub(super) const NOT_STATIC: &str = "it has other gradients than in its first step, or in another order, though a static graph was promised";

/// Finds out which gradients any rank has: 1 for each that is present, 0 for each that is not.
pub(super) struct Presence {
    /// See [`DdpConfig::static_graph`](super::DdpConfig::static_graph).
    promised: bool,
    /// The gradients that this rank has in each step, once it has had any.
    own: Option<Vec<u8>>,
    /// The gradients that any rank has, once all ranks have had some.
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

    /// Makes the ranks communicate again, in a step in which a rank cannot be sure that the others take the same path.
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
        // A rank without a batch has no gradients at all, which does not break the promise.
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
