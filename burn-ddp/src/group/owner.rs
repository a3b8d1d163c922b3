//! Notices that the program has dropped its last handle in a panic, although asynchronous calls still hold theirs.

use std::{sync::Arc, thread};

use super::{Inner, ProcessGroup};
use crate::DdpError;

/// What all handles of the program share.
pub(super) struct Owner {
    inner: Arc<Inner>,
}

impl Owner {
    pub(super) fn of(inner: &Arc<Inner>) -> Self {
        let inner = inner.clone();
        Self { inner }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if thread::panicking() {
            let (rank, reason) = (self.inner.job_rank, "it panicked".into());
            self.inner
                .transport
                .fail(DdpError::Aborted { rank, reason });
        }
    }
}

impl ProcessGroup {
    /// A handle for an asynchronous call, which is none of the program's.
    pub(crate) fn for_a_call(&self) -> Self {
        Self {
            _owner: None,
            ..self.clone()
        }
    }
}
