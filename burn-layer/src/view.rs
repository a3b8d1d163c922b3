//! [`View`]: a view that is taken when it is needed.

use core::fmt;
use parking_lot::Mutex;

/// A tensor in another shape, which is taken when its elements are needed. No kernel of a backend that fuses ops goes on after a
/// view of its result. If the next op takes the elements in another dtype, the tensor is cast before it is viewed: in the kernel
/// that computes it.
pub(crate) struct View<P> {
    tensor: Mutex<State<P>>,
    take: Box<dyn Fn(P) -> P + Send + Sync>,
}

#[derive(Clone)]
enum State<P> {
    Waits(P),
    Taken(P),
}

impl<P: Clone> View<P> {
    /// The view of a tensor that `take` gives, in any dtype.
    pub(crate) fn new(of: P, take: impl Fn(P) -> P + Send + Sync + 'static) -> Self {
        Self {
            tensor: Mutex::new(State::Waits(of)),
            take: Box::new(take),
        }
    }

    /// The view. Nothing is locked while it is taken.
    pub(crate) fn get(&self) -> P {
        let state = self.tensor.lock().clone();
        match state {
            State::Waits(of) => {
                let view = (self.take)(of);
                *self.tensor.lock() = State::Taken(view.clone());
                view
            }
            State::Taken(view) => view,
        }
    }

    /// What `cast`, which leaves the shape as it is, makes of the view.
    pub(crate) fn cast(&self, cast: impl FnOnce(P) -> P) -> P {
        let state = self.tensor.lock().clone();
        match state {
            State::Waits(of) => (self.take)(cast(of)),
            State::Taken(view) => cast(view),
        }
    }
}

impl<P> fmt::Debug for View<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let taken = matches!(*self.tensor.lock(), State::Taken(_));
        f.debug_struct("View").field("taken", &taken).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    };

    /// A view of a "tensor" that is the list of what was done to it.
    fn view() -> (View<Vec<&'static str>>, Arc<AtomicUsize>) {
        let taken = Arc::new(AtomicUsize::new(0));
        let times = taken.clone();
        let take = move |mut of: Vec<_>| {
            times.fetch_add(1, Relaxed);
            of.push("viewed");
            of
        };
        (View::new(vec!["computed"], take), taken)
    }

    fn cast(mut tensor: Vec<&'static str>) -> Vec<&'static str> {
        tensor.push("cast");
        tensor
    }

    #[test]
    fn it_is_cast_before_it_is_viewed() {
        let (view, taken) = view();
        assert_eq!(taken.load(Relaxed), 0);
        assert_eq!(view.cast(cast), ["computed", "cast", "viewed"]);
        assert_eq!(view.get(), ["computed", "viewed"]);
    }

    #[test]
    fn it_is_taken_once() {
        let (view, taken) = view();
        for _ in 0..2 {
            assert_eq!(view.get(), ["computed", "viewed"]);
            assert_eq!(view.cast(cast), ["computed", "viewed", "cast"]);
        }
        assert_eq!(taken.load(Relaxed), 1);
    }
}
