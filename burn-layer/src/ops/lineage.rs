//! [`Lineage`]: which forward an op is the backward of.
//!
//! An op does not say whether it is part of backward. What tells is its inputs. A backward pass begins with a tensor of ones,
//! in the shape of the loss, and everything that it makes of that is linear in it. So gradients are what comes of a single one:
//! products of a gradient with anything are gradients, and sums only if all terms are. The difference of a parameter and a
//! gradient, which an optimizer makes, is none. A parameter of one element that begins as 1 looks the same, until what it is
//! multiplied with comes to an op that no backward has: one with a backward of its own, or a product by what is not transposed.
//!
//! Activations are told from parameters likewise: they come of products.
//!
//! Gradient checkpointing computes activations again, and of those nothing is known. So what a gradient is of, a product `dy w^T`
//! tells by its weight, and the product `x^T dy`, which Burn makes next, by that.

use crate::{
    LayeredFloat, Op,
    rows::{Rows, Used},
    scope::Scope,
};
use burn_backend::{Backend, DType, Shape, TensorMetadata};
use std::sync::Arc;

/// The float inputs of an op, as far as they tell whether it is part of backward.
pub(crate) struct Lineage {
    op: Op,
    /// The inputs of ops that have or are a backward.
    inputs: Vec<Input>,
    any_gradient: bool,
    all_gradients: bool,
    any_computed: bool,
}

struct Input {
    rows: Arc<Rows>,
    columns: Option<Arc<Rows>>,
    storage: DType,
    gradient: bool,
    /// Its last dimension.
    width: Option<usize>,
    /// And the one before.
    height: Option<usize>,
    /// How many matrices it is a batch of.
    batch: usize,
}

/// The forward that an op is the backward of.
pub(crate) struct Forward {
    /// The scope that it was in, if any.
    pub(crate) scope: Option<Arc<Scope>>,
    /// What its first float input was stored in, where the op makes the gradient of that.
    pub(crate) gradient_of: Option<DType>,
    /// Whether the op makes the gradient of a factor that a batch of matrices shared.
    pub(crate) of_shared: bool,
}

impl Lineage {
    pub(crate) fn new(op: Op) -> Self {
        Self {
            op,
            inputs: Vec::new(),
            any_gradient: false,
            all_gradients: true,
            any_computed: false,
        }
    }

    pub(crate) fn see<B: Backend>(&mut self, tensor: &LayeredFloat<B>) {
        self.any_gradient |= tensor.is_gradient();
        self.all_gradients &= tensor.is_gradient();
        self.any_computed |= tensor.is_computed();
        if self.op.has_backward() || self.op.is_backward() {
            let shape = tensor.shape();
            self.inputs.push(Input {
                rows: tensor.rows().clone(),
                columns: tensor.columns().cloned(),
                storage: tensor.storage_dtype(),
                gradient: tensor.is_gradient(),
                width: shape.last().copied(),
                height: shape.iter().rev().nth(1).copied(),
                batch: shape.iter().rev().skip(2).product(),
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
            of_shared: used.shared && !of_first,
            scope: used.scope,
        })
    }

    /// A product's gradients are products of its own with a factor of the forward, transposed: `dy w^T` and `x^T dy`. A factor
    /// may be in several; the one in question is as wide as the gradient.
    fn of_product(&self) -> Option<(Used, bool)> {
        let [left, right] = self.inputs.as_slice() else {
            return None;
        };
        let columns = |gradient: &Input, other: &Input| {
            let columns = other.columns.clone();
            columns.filter(|_| gradient.gradient)
        };
        let by_weight = columns(left, right).and_then(|weight| weight.used(left.width));
        if let Some(used) = by_weight {
            left.rows.set_backward_of(&used, right.width);
            return Some((used, true));
        }
        let input = columns(right, left)?;
        let told = right.rows.take_backward_of(left.height);
        let told = told.filter(|used| used.width == right.width && !input.excludes(used));
        let used = told.or_else(|| input.used(right.width))?;
        Some((used, false))
    }

    /// The last input is the gradient. Of the others, a weight comes after what it is applied to, and is in fewer ops.
    fn of_others(&self) -> Option<Used> {
        let (_, others) = self.inputs.split_last()?;
        others.iter().rev().find_map(|input| input.rows.used(None))
    }

    /// How the input was used before, if the op is part of `in_backward` though it is one of forward: Burn's backward of a sigmoid
    /// begins with that sigmoid, and gradient checkpointing makes others.
    pub(crate) fn is_once_more(&self, in_backward: bool) -> Option<Used> {
        let first = self.inputs.first()?;
        let used = || first.rows.used(None);
        (in_backward && ONCE_MORE.contains(&self.op) && !self.any_gradient).then(used)?
    }

    /// Says so to the inputs of an op that has a backward, when it ran in forward.
    pub(crate) fn used_in(&self, scope: Option<&Arc<Scope>>) {
        let Some(first) = self.inputs.first().filter(|_| self.op.has_backward()) else {
            return;
        };
        let product = self.op == Op::float_matmul;
        let last = self.inputs.last().filter(|_| product);
        let used = Used {
            width: last.and_then(|last| last.width),
            scope: scope.cloned(),
            first: first.storage,
            shared: last.is_some_and(|last| last.batch == 1 && first.batch > 1),
        };
        self.inputs
            .iter()
            .for_each(|input| input.rows.set_used(&used));
    }

    /// Whether the op is one of activations.
    pub(crate) fn is_of_activations(&self) -> bool {
        self.any_computed && !self.any_gradient
    }

    /// Whether the op is part of backward, if that can be told: what takes no gradient may be of either, elementwise.
    pub(crate) fn is_backward(&self) -> Option<bool> {
        match self.op {
            _ if self.any_gradient => Some(true),
            op => op.has_backward().then_some(false),
        }
    }

    /// Whether a result of that shape is a gradient.
    pub(crate) fn makes_gradient(&self, shape: &Shape) -> bool {
        match self.op {
            Op::float_ones => shape.num_elements() == 1,
            Op::float_add | Op::float_sub => self.any_gradient && self.all_gradients,
            Op::float_matmul => self
                .inputs
                .iter()
                .all(|factor| factor.gradient || (self.any_gradient && factor.columns.is_some())),
            op => self.any_gradient && !op.has_backward(),
        }
    }

    /// Whether a result comes of a product or another op of a layer, this one or one before, if it is no `gradient`. What an
    /// optimizer's step makes does not, whatever the parameter was made by: it is the sum of that and a gradient.
    pub(crate) fn makes_computed(&self, gradient: bool) -> bool {
        match self.op {
            Op::float_add | Op::float_sub if self.any_gradient => false,
            op => !gradient && (self.any_computed || op.has_backward() || op == Op::attention),
        }
    }
}

/// What Burn's autodiff may compute once more in backward, of the ops that have a backward of their own. The others it keeps: a
/// convolution of an image that was in one before is a forward of its own.
const ONCE_MORE: [Op; 4] = [Op::gelu, Op::relu, Op::sigmoid, Op::log_sigmoid];
