//! [`Recent`]: copies in another dtype that are given up when others were made.

use burn_backend::DType;
use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError, Weak},
};

/// As many as a block of a transformer goes back to: what queries, keys and values are made of, the scores between their maximum
/// and the difference from it.
const KEPT: usize = 4;

/// A copy that can be made again.
pub(crate) trait GiveUp: Send + Sync {
    fn give_up(&self);
}

impl<P: Send> GiveUp for Mutex<Option<(DType, P)>> {
    fn give_up(&self) {
        *self.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The copies that were made last. Backward needs activations once more, and until then a copy beside each would take half as
/// much memory again as these do, or twice as much where it is the wider one.
#[derive(Default)]
pub(crate) struct Recent(Mutex<VecDeque<Weak<dyn GiveUp>>>);

impl Recent {
    /// Keeps a copy for now. The caller has no copy locked.
    pub(crate) fn keep(&self, copy: Weak<dyn GiveUp>) {
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(|other| !other.ptr_eq(&copy));
        recent.push_back(copy);
        let oldest = (recent.len() > KEPT).then(|| recent.pop_front());
        drop(recent);
        if let Some(copy) = oldest.flatten().and_then(|copy| copy.upgrade()) {
            copy.give_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn the_oldest_is_given_up() {
        let recent = Recent::default();
        let copies: Vec<Arc<Mutex<Option<(DType, usize)>>>> = (0..KEPT + 1)
            .map(|number| Arc::new(Mutex::new(Some((DType::F32, number)))))
            .collect();
        let keep = |number: usize| {
            let copy: Weak<Mutex<_>> = Arc::downgrade(&copies[number]);
            recent.keep(copy);
        };
        let kept = || -> Vec<bool> {
            let is_there = |copy: &Arc<Mutex<Option<_>>>| copy.lock().unwrap().is_some();
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
}
