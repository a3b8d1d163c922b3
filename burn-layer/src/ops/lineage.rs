//! [`Lineage`]: which forward an op is the backward of.
//!
//! An op does not say whether it is part of backward; its inputs tell. A backward pass begins with a tensor of ones, in the shape
//! of the loss, and everything that it computes is linear in that tensor. So a tensor of ones that has one element counts as a
//! gradient, and so does what is computed from it: a product of a gradient with anything is a gradient, a sum only if all its
//! terms are, or zeros that backward made (the gradient of `floor`, or what it adds the gradients of windows to). The difference
//! of a parameter and a gradient, which an optimizer computes, is none. A parameter of one element that is initialized to 1 looks
//! like a gradient too, until its first step: the difference of a one and a gradient is none. Before that, what it is multiplied
//! with looks like one until it reaches an op that backward does not have: an op with a backward of its own, or a product with a
//! factor that is not transposed.
//!
//! Activations are told from parameters in the same way: they are computed from products.
//!
//! Gradient checkpointing computes activations again, and nothing is known of the new ones. So a product `dy w^T` recognizes its
//! forward by the weight and records it with `dy`, from which the product `x^T dy`, which Burn computes next, takes it.

use crate::{
    LayeredFloat, Op,
    float::Part,
    rows::{Rows, Used},
    scope::Scope,
};
use burn_backend::{Backend, DType, Shape, TensorMetadata};
use std::sync::Arc;

/// The float inputs of an op, as far as they tell whether it is part of backward.
pub(crate) struct Lineage {
    op: Op,
    /// The float inputs, if the op has or is a backward.
    inputs: Vec<Input>,
    any_gradient: bool,
    all_gradients: bool,
    any_computed: bool,
    /// For a difference: whether the first tensor is a [one](Part::One).
    from_one: bool,
    /// For a difference: whether the second tensor has the shape of the first, and was not computed by a network.
    by_like: bool,
    /// The shape of its first tensor.
    first: Option<Shape>,
}

struct Input {
    rows: Arc<Rows>,
    columns: Option<Arc<Rows>>,
    storage: DType,
    gradient: bool,
    /// The last dimension.
    width: Option<usize>,
    /// The last dimension but one.
    height: Option<usize>,
    /// The number of matrices in the batch.
    batch: usize,
}

/// The forward that an op is the backward of.
pub(crate) struct Forward {
    /// The scope that the forward was in, if any.
    pub(crate) scope: Option<Arc<Scope>>,
    /// If the op computes the gradient of the forward's first float input: the dtype which that was stored in. If forward used the
    /// other input several times, it is not known with which one, and this is the widest.
    pub(crate) gradient_of: Option<DType>,
    /// Whether the op computes the gradient of a factor that all matrices of a batch shared.
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
            from_one: false,
            by_like: false,
            first: None,
        }
    }

    pub(crate) fn see<B: Backend>(&mut self, tensor: &LayeredFloat<B>) {
        self.any_gradient |= tensor.is_gradient();
        let adds_nothing = self.op == Op::float_add && tensor.part() == Some(Part::Zeros);
        self.all_gradients &= tensor.is_gradient() || adds_nothing;
        self.any_computed |= tensor.is_computed();
        if self.op == Op::float_sub {
            let shape = tensor.shape();
            self.from_one |= self.first.is_none() && tensor.part() == Some(Part::One);
            self.by_like = !tensor.is_computed() && self.first.as_ref() == Some(&shape);
            self.first.get_or_insert(shape);
        }
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

    /// The forward that the op is the backward of, if one is known.
    pub(crate) fn forward(&self) -> Option<Forward> {
        let (used, of_first) = match self.op {
            Op::float_matmul => self.of_product()?,
            Op::conv1d | Op::conv2d | Op::conv3d => (self.of_transposed_convolution()?, true),
            op if op.is_backward() => (self.of_others()?, op.name().ends_with("_x_backward")),
            _ => return None,
        };
        Some(Forward {
            gradient_of: of_first.then_some(used.widest),
            of_shared: used.shared && !of_first,
            scope: used.scope,
        })
    }

    /// The forward product that the op is the backward of, and whether the op computes the gradient of its first factor. The two
    /// gradients are products of `dy` with the other factor, transposed: `dy w^T` and `x^T dy`. A factor may have been in several
    /// products; the one in question is as wide as `dy`.
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

    /// The transposed convolution of forward, if the op is a convolution that computes the gradient of its input. Burn's client has
    /// no op of its own for that.
    fn of_transposed_convolution(&self) -> Option<Used> {
        let forward = match self.op {
            Op::conv1d => Op::conv_transpose1d,
            Op::conv2d => Op::conv_transpose2d,
            Op::conv3d => Op::conv_transpose3d,
            _ => return None,
        };
        let [gradient, weight] = self.inputs.as_slice() else {
            return None;
        };
        weight.rows.used_by(forward).filter(|_| gradient.gradient)
    }

    /// The forward of an op whose name says that it is backward. The last input is the gradient. The others are asked from the
    /// last to the first, because a weight comes after the tensor that it is applied to, and is used in fewer ops. Some, such as
    /// the result of an activation, are only known from other uses.
    fn of_others(&self) -> Option<Used> {
        let (_, others) = self.inputs.split_last()?;
        let forward = self.op.forward()?;
        let others = || others.iter().rev();
        let own = others().find_map(|input| input.rows.used_by(forward));
        own.or_else(|| others().find_map(|input| input.rows.used(None)))
    }

    /// The earlier use of the input, if backward runs (`in_backward`) and the op repeats one of forward: Burn's backward of a
    /// sigmoid begins with that sigmoid, and gradient checkpointing repeats others.
    pub(crate) fn is_once_more(&self, in_backward: bool) -> Option<Used> {
        let first = self.inputs.first()?;
        let used = || first.rows.used(None);
        (in_backward && ONCE_MORE.contains(&self.op) && !self.any_gradient).then(used)?
    }

    /// Records the use with the inputs, if the op has a backward. To be called when the op runs in forward.
    pub(crate) fn used_in(&self, scope: Option<&Arc<Scope>>) {
        let Some(first) = self.inputs.first().filter(|_| self.op.has_backward()) else {
            return;
        };
        let product = self.op == Op::float_matmul;
        let last = self.inputs.last().filter(|_| product);
        let used = Used {
            op: self.op,
            width: last.and_then(|last| last.width),
            scope: scope.cloned(),
            first: first.storage,
            widest: first.storage,
            shared: last.is_some_and(|last| last.batch == 1 && first.batch > 1),
        };
        self.inputs
            .iter()
            .for_each(|input| input.rows.set_used(&used));
    }

    /// Whether the op computes something from activations, and not from gradients.
    pub(crate) fn is_of_activations(&self) -> bool {
        self.any_computed && !self.any_gradient
    }

    /// Whether the op is part of backward. `None` if that cannot be told: an elementwise op that takes no gradient may be part of
    /// forward or of backward.
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
            Op::float_add | Op::float_sub => {
                self.any_gradient && self.all_gradients && !self.from_one
            }
            Op::float_matmul => self
                .inputs
                .iter()
                .all(|factor| factor.gradient || (self.any_gradient && factor.columns.is_some())),
            Op::conv1d | Op::conv2d | Op::conv3d => self.of_transposed_convolution().is_some(),
            op => self.any_gradient && !op.has_backward(),
        }
    }

    /// Whether a result is computed by a product or a similar op of a network, this one or an earlier one, and is no `gradient`.
    /// The result of an optimizer's step is not, however the parameter was computed: it is the sum of that and a gradient. With
    /// weight decay, what is subtracted from the parameter comes of a sum of parameter and gradient, and is no gradient. Then the
    /// step is recognized by its place: a difference of two like tensors after the last op of backward, on the same thread.
    pub(crate) fn makes_computed(&self, gradient: bool, in_backward: bool) -> bool {
        match self.op {
            Op::float_add | Op::float_sub if self.any_gradient => false,
            Op::float_sub if self.by_like && in_backward => false,
            op => !gradient && (self.any_computed || op.has_backward() || op == Op::attention),
        }
    }
}

/// The ops with a backward of their own that Burn's autodiff may repeat in backward. It does not repeat others, so a convolution
/// of an image that was convolved before, for instance, is a forward of its own.
const ONCE_MORE: [Op; 4] = [Op::gelu, Op::relu, Op::sigmoid, Op::log_sigmoid];
