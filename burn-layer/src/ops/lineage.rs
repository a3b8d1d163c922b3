//! [`Lineage`]: which forward an op is the backward of.
//!
//! An op does not say whether it is part of backward. What tells is its inputs. A backward pass begins with a tensor of ones,
//! in the shape of the loss, and everything that it makes of that is linear in it. So gradients are what comes of a single one:
//! products of a gradient with anything are gradients, and sums only if all terms are. The difference of a parameter and a
//! gradient, which an optimizer makes, is none.

use crate::{
    LayeredFloat, Op,
    scope::Scope,
    tensor::{Rows, Used},
};
use burn_backend::{Backend, DType, Shape};
use std::sync::Arc;

/// The float inputs of an op, as far as they tell whether it is part of backward.
pub(crate) struct Lineage {
    op: Op,
    /// The inputs of ops that have or are a backward.
    inputs: Vec<Input>,
    any_gradient: bool,
    all_gradients: bool,
}

struct Input {
    rows: Arc<Rows>,
    columns: Option<Arc<Rows>>,
    storage: DType,
    gradient: bool,
}

/// The forward that an op is the backward of.
pub(crate) struct Forward {
    /// The scope that it was in, if any.
    pub(crate) scope: Option<Arc<Scope>>,
    /// What its first float input was stored in, where the op makes the gradient of that.
    pub(crate) gradient_of: Option<DType>,
}

impl Lineage {
    pub(crate) fn new(op: Op) -> Self {
        Self {
            op,
            inputs: Vec::new(),
            any_gradient: false,
            all_gradients: true,
        }
    }

    pub(crate) fn see<B: Backend>(&mut self, tensor: &LayeredFloat<B>) {
        self.any_gradient |= tensor.is_gradient();
        self.all_gradients &= tensor.is_gradient();
        if self.op.has_backward() || self.op.is_backward() {
            self.inputs.push(Input {
                rows: tensor.rows().clone(),
                columns: tensor.columns().cloned(),
                storage: tensor.storage_dtype(),
                gradient: tensor.is_gradient(),
            });
        }
    }

    /// The forward, if the op is the backward of one that is known.
    pub(crate) fn forward(&self) -> Option<Forward> {
        let (used, of_first) = match self.op {
            Op::float_matmul => self.of_product()?,
            op if op.is_backward() => (self.of_others()?, op.name().ends_with("_x_backward")),
            _ => return None,
        };
        Some(Forward {
            gradient_of: of_first.then_some(used.first),
            scope: used.scope,
        })
    }

    /// A product's gradients are products of its own with a factor of the forward, transposed: `dy w^T` and `x^T dy`.
    fn of_product(&self) -> Option<(Used, bool)> {
        let [left, right] = self.inputs.as_slice() else {
            return None;
        };
        let factor = |gradient: &Input, other: &Input| {
            let columns = other.columns.as_ref().filter(|_| gradient.gradient);
            columns.and_then(|columns| columns.used())
        };
        match factor(left, right) {
            Some(used) => Some((used, true)),
            None => Some((factor(right, left)?, false)),
        }
    }

    /// The last input is the gradient. Of the others, a weight comes after what it is applied to, and is in fewer ops.
    fn of_others(&self) -> Option<Used> {
        let (_, others) = self.inputs.split_last()?;
        others.iter().rev().find_map(|input| input.rows.used())
    }

    /// Says so to the inputs of an op that has a backward, when it ran in forward.
    pub(crate) fn used_in(&self, scope: Option<&Arc<Scope>>) {
        let Some(first) = self.inputs.first().filter(|_| self.op.has_backward()) else {
            return;
        };
        let used = Used {
            scope: scope.cloned(),
            first: first.storage,
        };
        self.inputs
            .iter()
            .for_each(|input| input.rows.set_used(&used));
    }

    /// Whether a result of that shape is a gradient.
    pub(crate) fn makes_gradient(&self, shape: &Shape) -> bool {
        match self.op {
            Op::float_ones => shape.num_elements() == 1,
            Op::float_add | Op::float_sub => self.any_gradient && self.all_gradients,
            _ => self.any_gradient,
        }
    }
}
