//! [`Recent`]: things that can be made again, and are given up when newer ones were made.

use burn_backend::DType;
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    sync::{
        Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Something that can be made again: a copy in another dtype, or a tensor that is cheap to compute.
pub(crate) trait GiveUp: Send + Sync {
    fn give_up(&self);
}

impl<P: Send> GiveUp for Mutex<Option<(DType, P)>> {
    fn give_up(&self) {
        *self.lock() = None;
    }
}

/// The items that were made or used last; older ones are given up. Activations live until backward, and if each kept a
/// copy until then, the copies would take half as much memory as the activations, or twice as much where they are wider.
pub(crate) struct Recent {
    items: Mutex<VecDeque<Weak<dyn GiveUp>>>,
    kept: AtomicUsize,
}

impl Recent {
    /// Keeps the last `kept` items.
    pub(crate) fn new(kept: usize) -> Self {
        Self {
            items: Mutex::default(),
            kept: kept.into(),
        }
    }

    /// Keeps the last `kept` items from now on.
    pub(crate) fn keep_so_many(&self, kept: usize) {
        self.kept.store(kept, Ordering::Relaxed);
    }

    /// Keeps `item` for now, and gives up the oldest if there are too many. The caller must not have any item locked.
    pub(crate) fn keep(&self, item: Weak<dyn GiveUp>) {
        let mut recent = self.items.lock();
        recent.retain(|other| !other.ptr_eq(&item));
        recent.push_back(item);
        let oldest = (recent.len() > self.kept.load(Ordering::Relaxed)).then(|| recent.pop_front());
        drop(recent);
        if let Some(item) = oldest.flatten().and_then(|item| item.upgrade()) {
            item.give_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    type Copied = Arc<Mutex<Option<(DType, usize)>>>;

    #[test]
    fn the_oldest_is_given_up() {
        const KEPT: usize = 4;
        let recent = Recent::new(KEPT);
        let copies: Vec<Copied> = (0..KEPT + 1)
            .map(|number| Arc::new(Mutex::new(Some((DType::F32, number)))))
            .collect();
        let keep = |number: usize| {
            let copy: Weak<Mutex<_>> = Arc::downgrade(&copies[number]);
            recent.keep(copy);
        };
        let kept = || -> Vec<bool> {
            let is_there = |copy: &Copied| copy.lock().is_some();
            copies.iter().map(is_there).collect()
        };
        (0..KEPT).for_each(keep);
        // One that is used again becomes the newest.
        keep(0);
        assert!(kept().into_iter().all(|is_there| is_there));
        keep(KEPT);
        let expected: Vec<bool> = (0..KEPT + 1).map(|number| number != 1).collect();
        assert_eq!(kept(), expected);
    }

    #[test]
    fn none_may_be_kept() {
        let recent = Recent::new(1);
        recent.keep_so_many(0);
        let copy: Copied = Arc::new(Mutex::new(Some((DType::F32, 1))));
        let weak: Weak<Mutex<_>> = Arc::downgrade(&copy);
        recent.keep(weak);
        assert_eq!(*copy.lock(), None);
    }
}
