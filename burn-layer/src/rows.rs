//! [`Rows`]: what is known of a tensor's rows, whatever its other dimensions.

use crate::{Descent, Op, kept::KeptValues, scope::Scope};
use burn_backend::DType;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

/// What is known of a tensor's rows. Its clones share it, and so do its reshapes that keep the last dimension, because they have
/// the same rows.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// The latest uses of the rows, in products of each width and in other ops. Backward recognizes its forward by them.
    used: Mutex<Vec<Used>>,
    /// If the rows are a gradient `dy`: the forward product that they were last found to belong to, by the product `dy w^T`.
    backward_of: Mutex<Option<Box<BackwardOf>>>,
    /// What layers keep with the rows.
    pub(crate) kept: KeptValues,
    /// What layers keep with the rows and with what optimizers make of them.
    pub(crate) descent: OnceLock<Descent>,
}

/// The forward of a product of backward, recognized by the weight.
#[derive(Clone, Debug)]
struct BackwardOf {
    used: Used,
    /// The last dimension of the forward's first factor.
    inputs: Option<usize>,
}

/// How a tensor was used in an op that [has a backward](crate::Op::has_backward).
#[derive(Clone, Debug)]
pub(crate) struct Used {
    pub(crate) op: Op,
    /// The last dimension of the op's result, if the op was a product.
    pub(crate) width: Option<usize>,
    /// The scope that the op was in, if any.
    pub(crate) scope: Option<Arc<Scope>>,
    /// The dtype that the first float input of the op was stored in.
    pub(crate) first: DType,
    /// The widest dtype of the first inputs in all such uses, where the use was looked up.
    pub(crate) widest: DType,
    /// Whether the op was a product of a batch of matrices with one last factor that they share.
    pub(crate) shared: bool,
}

impl Used {
    /// Whether the two uses are the same to backward.
    fn is_like(&self, other: &Self) -> bool {
        (self.op, self.width, self.first, self.shared)
            == (other.op, other.width, other.first, other.shared)
            && self.scope == other.scope
    }
}

impl Rows {
    /// The latest use of the rows: in a product of that width, or, for `None`, in another op.
    pub(crate) fn used(&self, width: Option<usize>) -> Option<Used> {
        self.latest(|used| used.width == width)
    }

    /// The latest use of the rows by an op.
    pub(crate) fn used_by(&self, op: Op) -> Option<Used> {
        self.latest(|used| used.op == op)
    }

    fn latest(&self, is_such: impl Fn(&Used) -> bool) -> Option<Used> {
        let used = self.used.lock();
        let such = || used.iter().filter(|used| is_such(used));
        let widest = such().map(|used| used.first).max_by_key(DType::size)?;
        let latest = such().next_back()?.clone();
        Some(Used { widest, ..latest })
    }

    /// Records the latest use. It replaces one that is the same to backward, so the list does not grow from step to step.
    pub(crate) fn set_used(&self, now: &Used) {
        let mut used = self.used.lock();
        used.retain(|used| !used.is_like(now));
        used.push(now.clone());
    }

    /// Records that the rows are the gradient of the product `used`, whose first factor had `inputs` as its last dimension.
    pub(crate) fn set_backward_of(&self, used: &Used, inputs: Option<usize>) {
        *self.backward_of.lock() = Some(Box::new(BackwardOf {
            used: used.clone(),
            inputs,
        }));
    }

    /// The product that the rows are the gradient of, if its first factor had `inputs` as its last dimension. It is forgotten
    /// then: the gradient of the weight, which asks for it, is computed once.
    pub(crate) fn take_backward_of(&self, inputs: Option<usize>) -> Option<Used> {
        let mut backward_of = self.backward_of.lock();
        let of = backward_of.take_if(|of| of.inputs == inputs);
        of.map(|of| of.used)
    }

    /// Whether uses of the rows in products of the width of `one` are known, and none of them is like `one`.
    pub(crate) fn excludes(&self, one: &Used) -> bool {
        let used = self.used.lock();
        let mut of_width = used
            .iter()
            .filter(|used| used.width == one.width)
            .peekable();
        of_width.peek().is_some() && of_width.all(|used| !used.is_like(one))
    }
}
