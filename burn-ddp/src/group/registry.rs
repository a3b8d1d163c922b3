//! The communicators of this process by id, so that an operation which runs elsewhere in the process (on a
//! served device) can find its group.

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use super::Inner;

static KNOWN: LazyLock<Mutex<HashMap<u64, Weak<Inner>>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(1);

fn known() -> MutexGuard<'static, HashMap<u64, Weak<Inner>>> {
    KNOWN.lock().expect("no panic under lock")
}

pub(super) fn next_id() -> u64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Keeps a communicator findable for as long as a handle of it lives.
pub(super) fn remember(id: u64, inner: &Arc<Inner>) {
    let mut known = known();
    known.retain(|_, inner| inner.strong_count() > 0);
    known.insert(id, Arc::downgrade(inner));
}

pub(super) fn find(id: u64) -> Option<Arc<Inner>> {
    known().get(&id).and_then(Weak::upgrade)
}

#[cfg(test)]
mod tests {
    use crate::{LocalGroup, ProcessGroup};

    #[test]
    fn groups_are_found_by_number_while_they_live() {
        let groups = LocalGroup::new(2);
        let id = groups[1].id();
        assert_eq!(ProcessGroup::by_id(id).unwrap().rank(), 1);
        drop(groups);
        assert!(ProcessGroup::by_id(id).is_none());
    }
}
