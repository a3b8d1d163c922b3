//! [`WeakGroup`], for what may live longer than the program's group.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use super::{Inner, ProcessGroup};

/// A handle that does not keep the group: a rank says goodbye when its last handle is dropped.
#[derive(Clone)]
pub(crate) struct WeakGroup {
    inner: Weak<Inner>,
    timeout: Duration,
}

impl WeakGroup {
    /// The group, if the program still has it.
    pub(crate) fn upgrade(&self) -> Option<ProcessGroup> {
        Some(ProcessGroup {
            inner: self.inner.upgrade()?,
            timeout: self.timeout,
            _owner: None,
        })
    }
}

impl ProcessGroup {
    /// A handle that does not keep the group.
    pub(crate) fn downgrade(&self) -> WeakGroup {
        WeakGroup {
            inner: Arc::downgrade(&self.inner),
            timeout: self.timeout,
        }
    }

    /// Keeps another group for as long as this one.
    pub(crate) fn keep(&self, other: ProcessGroup) {
        let mut kept = self.inner.kept.lock().expect("no panic under lock");
        kept.push(other);
    }
}
