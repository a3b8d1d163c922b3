//! [`Rows`]: what is known of a tensor's rows, in whichever shape they are.

use crate::{Descent, kept::KeptValues, scope::Scope};
use burn_backend::DType;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// What the clones of a tensor share with its reshapes that keep the last dimension: its rows are theirs.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// How they were last used, which their backward goes by: in products of each width, and in other ops.
    used: Mutex<Vec<Used>>,
    /// The forward that they were last the gradient of, by the product `dy w^T`.
    backward_of: Mutex<Option<Box<BackwardOf>>>,
    /// What layers keep with them.
    pub(crate) kept: KeptValues,
    /// What layers keep with them and what optimizers make of them.
    pub(crate) descent: OnceLock<Descent>,
}

/// The forward of a product of backward, as the weight tells it.
#[derive(Clone, Debug)]
struct BackwardOf {
    used: Used,
    /// The last dimension of the forward's first factor.
    inputs: Option<usize>,
}

/// How a tensor was used in an op whose backward is ops of their own.
#[derive(Clone, Debug)]
pub(crate) struct Used {
    /// The last dimension of what came of it, where the op was a product.
    pub(crate) width: Option<usize>,
    /// The scope, if it was in one.
    pub(crate) scope: Option<Arc<Scope>>,
    /// The dtype that the first float input of the op was stored in.
    pub(crate) first: DType,
    /// Whether the op was a product of a batch of matrices, all by the same last factor.
    pub(crate) shared: bool,
}

impl Used {
    /// Whether a backward cannot tell them apart.
    fn is_like(&self, other: &Self) -> bool {
        let scope = |used: &Self| used.scope.as_ref().map(Arc::as_ptr);
        (self.width, self.first, self.shared) == (other.width, other.first, other.shared)
            && scope(self) == scope(other)
    }
}

impl Rows {
    /// How they were last used, in a product of that width or in another op.
    pub(crate) fn used(&self, width: Option<usize>) -> Option<Used> {
        let used = lock(&self.used);
        used.iter().rev().find(|used| used.width == width).cloned()
    }

    /// There are as many as scopes that they are used in.
    pub(crate) fn set_used(&self, now: &Used) {
        let mut used = lock(&self.used);
        used.retain(|used| !used.is_like(now));
        used.push(now.clone());
    }

    /// They are the gradient of a product whose first factor was so wide.
    pub(crate) fn set_backward_of(&self, used: &Used, inputs: Option<usize>) {
        *lock(&self.backward_of) = Some(Box::new(BackwardOf {
            used: used.clone(),
            inputs,
        }));
    }

    /// The product that they are the gradient of, if its first factor was so wide. It is told once: the gradient of the weight
    /// comes next.
    pub(crate) fn take_backward_of(&self, inputs: Option<usize>) -> Option<Used> {
        let mut backward_of = lock(&self.backward_of);
        let of = backward_of.take_if(|of| of.inputs == inputs);
        of.map(|of| of.used)
    }

    /// Whether they are known to have been used otherwise in every product of that width.
    pub(crate) fn excludes(&self, one: &Used) -> bool {
        let used = lock(&self.used);
        let mut of_width = used
            .iter()
            .filter(|used| used.width == one.width)
            .peekable();
        of_width.peek().is_some() && of_width.all(|used| !used.is_like(one))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
