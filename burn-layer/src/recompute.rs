//! [`Recomputed`]: a tensor that may be given up, because it can be computed again.

use crate::{LayerSet, Op, recent::GiveUp};
use burn_backend::DType;
use core::fmt;
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// How often a value is computed again in forward before it is kept: it is used in a loop then, as an input by the steps of an RNN.
const OFTEN: usize = 2;

/// The longest chain of tensors that are computed again from each other. It bounds what one use may cost.
pub(crate) const DEPTH: usize = 16;

/// The result of a cheap op, with the inputs that it was computed from. Clones of a tensor share it. The value is kept for a
/// [while](crate::recent::Recent). If it is used after that, the same op computes it again from the same inputs; if that
/// happens [often](OFTEN), the value is kept as long as the tensor.
pub(crate) struct Recomputed<P> {
    state: Mutex<State<P>>,
    /// How often it was computed again in forward.
    again: AtomicUsize,
    /// Whether it is about to be computed for the first time.
    first: AtomicBool,
    op: Op,
    /// The length of the chain of tensors that are computed from each other to get this one, itself included.
    pub(crate) depth: usize,
}

enum State<P> {
    /// As long as the tensor. What would compute it holds the inputs, and is dropped.
    Kept(P),
    /// For a while, if it is there.
    Again(Option<P>, Ways<P>),
}

/// How a value is computed.
struct Ways<P> {
    compute: Arc<dyn Fn() -> P + Send + Sync>,
    /// What computes it in another dtype, if it is not there: a view of the viewed tensor, or a kernel that rounds what it computes.
    view: Option<Arc<dyn Fn(DType) -> P + Send + Sync>>,
}

impl<P: Clone + Send + 'static> Recomputed<P> {
    /// The result of `op`, which `compute` gives again. `value` is the result if it is computed already.
    pub(crate) fn new(
        op: Op,
        value: Option<P>,
        depth: usize,
        compute: impl Fn() -> P + Send + Sync + 'static,
    ) -> Self {
        let ways = Ways {
            compute: Arc::new(compute),
            view: None,
        };
        Self {
            state: Mutex::new(State::Again(value, ways)),
            again: AtomicUsize::new(0),
            first: AtomicBool::new(false),
            op,
            depth,
        }
    }

    /// The result of an op that waits to be computed once. After that it is computed again.
    pub(crate) fn waiting(
        op: Op,
        depth: usize,
        compute: impl Fn() -> P + Send + Sync + 'static,
    ) -> Self {
        Self {
            first: AtomicBool::new(true),
            ..Self::new(op, None, depth, compute)
        }
    }

    /// If it is not to be `again`: once it was computed, it is kept.
    pub(crate) fn computed(self, again: bool) -> Self {
        match again {
            true => self,
            false => Self {
                again: AtomicUsize::new(OFTEN),
                ..self
            },
        }
    }

    /// `view` computes it in another dtype: of a viewed tensor, or by a kernel that rounds what it computes.
    pub(crate) fn with_view(mut self, view: impl Fn(DType) -> P + Send + Sync + 'static) -> Self {
        if let State::Again(_, ways) = self.state.get_mut() {
            ways.view = Some(Arc::new(view));
        }
        self
    }

    /// The tensor, computed again if it was given up. Nothing is locked meanwhile, so two threads may both compute it.
    pub(crate) fn get(self: &Arc<Self>, layer: &LayerSet) -> P {
        let there = match &*self.state.lock() {
            State::Kept(value) | State::Again(Some(value), _) => Ok(value.clone()),
            State::Again(None, ways) => Err(ways.compute.clone()),
        };
        let value = there.unwrap_or_else(|compute| {
            if !self.first.swap(false, Ordering::Relaxed) {
                if !self.op.is_view() {
                    layer.recomputed(self.op);
                }
                if !layer.is_in_backward() {
                    self.again.fetch_add(1, Ordering::Relaxed);
                }
            }
            let value = compute();
            self.set(value.clone());
            value
        });
        layer.keep_value_for_now(self);
        value
    }

    /// What is not there in `dtype`: no kernel goes on from a view, or from one of our own, to a cast.
    pub(crate) fn viewed_in(&self, dtype: DType) -> Option<P> {
        let view = match &*self.state.lock() {
            State::Again(None, ways) => ways.view.clone()?,
            _ => return None,
        };
        Some(view(dtype))
    }
}

impl<P> Recomputed<P> {
    /// Whether the value is kept as long as the tensor, once it is there.
    fn is_kept(&self) -> bool {
        self.again.load(Ordering::Relaxed) >= OFTEN
    }

    fn set(&self, value: P) {
        let mut state = self.state.lock();
        let before = match &mut *state {
            State::Again(place, _) if !self.is_kept() => {
                *place = Some(value);
                return;
            }
            state => core::mem::replace(state, State::Kept(value)),
        };
        // The inputs may lock what they like when they are dropped.
        drop(state);
        drop(before);
    }
}

impl<P: Send> GiveUp for Recomputed<P> {
    fn give_up(&self) {
        if let State::Again(value, _) = &mut *self.state.lock()
            && !self.is_kept()
        {
            *value = None;
        }
    }
}

impl<P> fmt::Debug for Recomputed<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recomputed")
            .field("op", &self.op)
            .field("depth", &self.depth)
            .finish_non_exhaustive()
    }
}
