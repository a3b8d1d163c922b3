//! [`Statistics`]: the maximum of each row of a softmax's input, and the sum of its exponents.

use super::{Logits, Softmaxes, role::scores};
use crate::{LayeredFloat, ends::End};
use burn_backend::{Backend, DType, Shape, TensorMetadata, tensor::FloatTensor};
use parking_lot::Mutex;
use std::sync::{
    Weak,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// The maximum of each row, and the sum of `exp(x - maximum)`. They wait until they are needed: a softmax that comes first computes them
/// in its own kernel.
pub(crate) struct Statistics<B: Backend> {
    kernels: Softmaxes<B>,
    /// The shape of what they are of.
    shape: Shape,
    state: Mutex<State<B>>,
    /// Whether there is a softmax of them, or its logarithm.
    joined: AtomicBool,
}

enum State<B: Backend> {
    /// For what they are of.
    Waits(Box<LayeredFloat<B>>),
    Computed([FloatTensor<B>; 2]),
}

impl<B: Backend> Statistics<B> {
    pub(super) fn new(kernels: Softmaxes<B>, of: LayeredFloat<B>) -> Self {
        Self {
            kernels,
            shape: of.shape(),
            state: Mutex::new(State::Waits(Box::new(of))),
            joined: AtomicBool::new(false),
        }
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Notes that there is a softmax of them, or its logarithm.
    pub(super) fn join(&self) {
        self.joined.store(true, Relaxed);
    }

    /// The maxima and the sums.
    pub(super) fn get(&self) -> [FloatTensor<B>; 2] {
        let mut state = self.state.lock();
        let statistics = match &*state {
            State::Waits(of) => (self.kernels.statistics)(logits(of)),
            State::Computed(statistics) => return statistics.clone(),
        };
        *state = State::Computed(statistics.clone());
        statistics
    }

    /// The softmax of `of`, in that dtype.
    pub(super) fn softmax(&self, of: &LayeredFloat<B>, dtype: DType) -> FloatTensor<B> {
        let mut state = self.state.lock();
        if let State::Computed(statistics) = &*state {
            return (self.kernels.forward)(logits(of), statistics.clone(), dtype);
        }
        let [maxima, sums, softmax] = (self.kernels.softmax)(logits(of), dtype);
        *state = State::Computed([maxima, sums]);
        softmax
    }
}

/// Statistics that may be all that the program wants. If there is no softmax by the next op of a network, they are computed then:
/// those that a program collects would hold what they are of until the end.
pub(super) struct Unjoined<B: Backend>(pub(super) Weak<Statistics<B>>);

impl<B: Backend> End for Unjoined<B> {
    fn compute(&self) {
        let alone = |of: &Statistics<B>| !of.joined.load(Relaxed);
        if let Some(statistics) = self.0.upgrade().filter(|of| alone(of)) {
            statistics.get();
        }
    }

    fn end(&self) {}
}

/// The tensor, of what its kernels compute it.
pub(super) fn logits<B: Backend>(x: &LayeredFloat<B>) -> Logits<B> {
    match scores(x) {
        Some(scores) => scores.logits(),
        None => Logits::of(x.clone().into_storage()),
    }
}
