//! [`Plan`]: how one op runs, and [`Inputs`]: what a layer decides it by.

use crate::{LayeredFloat, float::Part, kept::look, rows::Rows, scope::Scope};
use burn_backend::{Backend, DType, Shape, TensorMetadata};
use std::{any::Any, sync::Arc};

/// What a [`Layer`](crate::Layer) is told about an op's float inputs: their dtypes, their shapes, and where they come from.
///
/// A float tensor of a layered device has two dtypes: the one that the program sees, and the one that it is stored in.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The dtype that the program sees: that of the first float input.
    pub nominal: DType,
    /// The dtype that the first float input is stored in.
    pub first: DType,
    /// Whether the first float input was just made by transposing the last two dimensions of a tensor.
    pub first_transposed: bool,
    /// The same of the last float input.
    pub last_transposed: bool,
    /// Whether the first float input is a gradient: computed from the one that a backward pass begins with.
    pub first_is_gradient: bool,
    /// The same of the last float input.
    pub last_is_gradient: bool,
    /// Whether the last float input was computed by a product or a similar op of a network, as activations are. `false` for
    /// parameters, for what optimizers and elementwise ops make of parameters, and for data that the program uploaded.
    pub last_is_computed: bool,
    /// The narrowest dtype that holds every input's storage dtype (f16 and bf16 together: f32).
    pub widest: DType,
    /// Whether the inputs are stored in more than one dtype.
    pub mixed: bool,
    /// The shapes of the float inputs, in the op's order.
    pub shapes: Vec<Shape>,
    /// Whether there are several inputs and all are the same tensor, as in `x * x`, which is how Burn
    /// computes a square.
    pub same: bool,
    /// Whether the first or the last input is the transposition of the other, as in `x x^T`.
    pub mirrored: bool,
    /// Whether the second of two inputs is the maximum of the first along a dimension, as in `x - max(x)`, with which a
    /// softmax begins in training.
    pub shifted: bool,
    /// Whether the first of two inputs is the result of a product, and the second a vector that was reshaped to be added to
    /// each of its rows. Burn computes a linear layer with a bias in this way.
    pub biased: bool,
    /// For an elementwise product with a mask of zeros and ones, whether drawn (`Distribution::Bernoulli`, which is how Burn
    /// computes dropout) or converted from booleans: the dtype that the other input is stored in. It holds the product exactly.
    pub masked: Option<DType>,
    /// For an elementwise product with a sigmoid, which is how Burn computes `silu` and gates: the dtype that the other input
    /// is stored in.
    pub gated: Option<DType>,
    /// For the sum in backward of the two gradients of a tensor that forward multiplied by its own sigmoid, as `silu` does: the dtype that
    /// the gradient by way of the product is stored in.
    pub of_gated: Option<DType>,
    /// For a product or convolution of backward that computes the gradient of its forward op's first float input: the dtype
    /// that this input was stored in. `None` for every other op.
    pub gradient_of: Option<DType>,
    /// Whether the op is a product of backward, `x^T dy`, that computes the gradient of a factor which all matrices of a batch
    /// share, as they share a linear layer's weight. Burn computes one such product for each matrix, and sums them.
    pub of_shared: bool,
    /// Whether the op is a reshape to one dimension. In backward, this is the gradient of a vector that forward used as a row,
    /// such as a bias; if there were several rows, they have been summed before.
    pub to_vector: bool,
    /// Whether the op's two inputs are vectors times numbers.
    pub(crate) averages: bool,
    /// Which part of something that Burn computes by several ops the first float input may be.
    pub(crate) first_part: Option<Part>,
    /// The same of the last one.
    pub(crate) last_part: Option<Part>,
    /// The scope of the op.
    pub(crate) scope: Option<Arc<Scope>>,
    /// The rows of the first float input.
    pub(crate) first_rows: Option<Arc<Rows>>,
    /// The rows of the tensor that the first float input is the transposition of.
    pub(crate) first_columns: Option<Arc<Rows>>,
    /// The rows of the tensor that the last float input is the transposition of.
    pub(crate) last_columns: Option<Arc<Rows>>,
    /// The rows of the last float input.
    pub(crate) last_rows: Option<Arc<Rows>>,
}

impl Inputs {
    /// The inputs of an op of which `tensor` is the first and, so far, the only one.
    pub(crate) fn new<B: Backend>(tensor: &LayeredFloat<B>) -> Self {
        let first = tensor.meant_dtype();
        let columns = tensor.columns();
        Self {
            nominal: tensor.dtype(),
            first,
            first_transposed: columns.is_some(),
            last_transposed: columns.is_some(),
            first_is_gradient: tensor.is_gradient(),
            last_is_gradient: tensor.is_gradient(),
            last_is_computed: tensor.is_computed(),
            widest: first,
            mixed: first != tensor.storage_dtype(),
            first_part: tensor.part(),
            last_part: tensor.part(),
            first_rows: Some(tensor.rows().clone()),
            first_columns: columns.cloned(),
            last_columns: columns.cloned(),
            last_rows: Some(tensor.rows().clone()),
            ..Self::mask(vec![tensor.shape()], first)
        }
    }

    /// For a draw of zeros and ones in `dtype`, which has no float inputs.
    pub(crate) fn mask(shapes: Vec<Shape>, dtype: DType) -> Self {
        Self {
            nominal: dtype,
            first: dtype,
            first_transposed: false,
            last_transposed: false,
            first_is_gradient: false,
            last_is_gradient: false,
            last_is_computed: false,
            widest: dtype,
            mixed: false,
            shapes,
            same: false,
            mirrored: false,
            shifted: false,
            biased: false,
            masked: None,
            gated: None,
            of_gated: None,
            gradient_of: None,
            of_shared: false,
            to_vector: false,
            averages: false,
            first_part: None,
            last_part: None,
            scope: None,
            first_rows: None,
            first_columns: None,
            last_columns: None,
            last_rows: None,
        }
    }

    /// The plan that computes in the dtype of the inputs, or in the [widest](Self::widest) of them where they differ.
    pub fn promote(&self) -> Plan {
        Plan {
            compute: self.mixed.then_some(self.widest),
            ..Plan::default()
        }
    }

    /// Whether the first float input is stored in 16 bits.
    pub fn stored_low(&self) -> bool {
        matches!(self.first, DType::F16 | DType::BF16)
    }

    /// The value of type `T` of the innermost [scope](crate::scoped) that the op is in.
    pub fn scope<T: Any>(&self) -> Option<&T> {
        self.scope.as_ref()?.values().next()
    }

    /// The values of type `T` of all [scopes](crate::scoped) that the op is in, outermost first.
    pub fn scopes<T: Any>(&self) -> Vec<&T> {
        crate::scope::values(self.scope.as_deref())
    }

    /// Calls `body` with the value of type `T` that is [kept](crate::Kept) with the tensor that the first float input is the
    /// transposition of. `None` if it is no transposition, or nothing is kept.
    pub fn kept_with_transposed<T: Any, R>(&self, body: impl FnOnce(&T) -> R) -> Option<R> {
        look(&self.first_columns.as_ref()?.kept, body)
    }

    /// The same for the last float input.
    pub fn kept_with_last_transposed<T: Any, R>(&self, body: impl FnOnce(&T) -> R) -> Option<R> {
        look(&self.last_columns.as_ref()?.kept, body)
    }

    /// Calls `body` with the value of type `T` that is [kept](crate::Kept) with the last float input. `None` if nothing is kept.
    pub fn kept_with_last<T: Any, R>(&self, body: impl FnOnce(&T) -> R) -> Option<R> {
        look(&self.last_rows.as_ref()?.kept, body)
    }

    /// Adds the next input. `same`: whether all inputs so far, and this one, are the same tensor.
    pub(crate) fn add<B: Backend>(&mut self, tensor: &LayeredFloat<B>, same: bool) {
        let storage = tensor.meant_dtype();
        let shape = tensor.shape();
        self.biased = (self.first_part, tensor.part()) == (Some(Part::Product), Some(Part::Row))
            && shape.last() == self.shapes[0].last();
        let beside = |part| match (self.first_part, tensor.part()) {
            (_, last) if last == Some(part) => Some(self.first),
            (first, _) if first == Some(part) => Some(storage),
            _ => None,
        };
        let two = self.shapes.len() == 1;
        let weighted = Some(Part::Weighted);
        self.averages = two && (self.first_part, tensor.part()) == (weighted, weighted);
        self.masked = beside(Part::Mask).filter(|_| two);
        self.gated = beside(Part::Gate).filter(|_| two);
        self.of_gated = match (self.first_part, tensor.part()) {
            (Some(Part::OfGated), Some(Part::OfGate)) if two => Some(self.first),
            (Some(Part::OfGate), Some(Part::OfGated)) if two => Some(storage),
            _ => None,
        };
        self.last_part = tensor.part();
        self.shapes.push(shape);
        self.last_transposed = tensor.columns().is_some();
        self.last_columns = tensor.columns().cloned();
        self.last_rows = Some(tensor.rows().clone());
        self.last_is_gradient = tensor.is_gradient();
        self.last_is_computed = tensor.is_computed();
        self.mixed |= self.widest != storage || storage != tensor.storage_dtype();
        self.widest = widest(self.widest, storage);
        self.same = same;
        let are = |columns: Option<&Arc<Rows>>, rows: Option<&Arc<Rows>>| {
            columns
                .zip(rows)
                .is_some_and(|(columns, rows)| Arc::ptr_eq(columns, rows))
        };
        self.mirrored = are(tensor.columns(), self.first_rows.as_ref())
            || are(self.first_columns.as_ref(), Some(tensor.rows()));
    }
}

fn widest(a: DType, b: DType) -> DType {
    match (a, b) {
        _ if a == b => a,
        (DType::F64, _) | (_, DType::F64) => DType::F64,
        // f16 and bf16 hold different numbers: only f32 holds both.
        _ => DType::F32,
    }
}

/// How a [`Layer`](crate::Layer) wants an op to run: the dtype to compute in, the dtype to store, and what may be computed again.
///
/// Constants are kept all the same. If the dtype to compute in or to store would round a constant to 0 or infinity (of a sum or difference
/// with a scalar), or to 0, 1 or -1 (of a fill, clamp or comparison), the op runs in the dtype that the program sees. Too large constants
/// of fills, clamps and comparisons become the largest number of a narrower dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The dtype that all float inputs are cast to first. `None` leaves them as they are.
    pub compute: Option<DType>,
    /// The dtype that float outputs are stored in. `None` stores them as computed.
    pub store: Option<DType>,
    /// Whether the layer [runs](crate::Layer::run) the op itself, on the inputs as they are stored.
    pub own: bool,
    /// Whether the op's result may be dropped and computed again, by the same op on the same inputs, where it is needed once
    /// more, as in backward. (A backend that fuses ops may round differently the second time.)
    ///
    /// This is done with activations alone, where the op is [cheap](crate::Op::is_cheap) and keeping its inputs takes less
    /// memory than keeping its result: one input is as large as the result but in a narrower dtype, or is kept in any case, as by
    /// Burn's autodiff, and the others are small.
    pub recompute: bool,
    /// Whether a product that [computes the gradient of a shared factor](Inputs::of_shared) waits for the sum over its batch, and
    /// is then one product over all rows of the batch, as in PyTorch. The products of single matrices are never written. A layer that runs
    /// the op itself is asked [for the sum](crate::Run::sums_batch).
    pub over_batch: bool,
}

impl Plan {
    /// The op as it arrives.
    const PLAIN: Self = Self {
        compute: None,
        store: None,
        own: false,
        recompute: false,
        over_batch: false,
    };

    /// Compute in `dtype`, and store the output as computed.
    pub const fn compute(dtype: DType) -> Self {
        Self {
            compute: Some(dtype),
            ..Self::PLAIN
        }
    }

    /// The layer [runs](crate::Layer::run) the op itself.
    pub const fn own() -> Self {
        Self {
            own: true,
            ..Self::PLAIN
        }
    }

    /// This plan, with a gradient that is summed over a batch computed [as one product](Self::over_batch).
    pub const fn over_batch(self) -> Self {
        Self {
            over_batch: true,
            ..self
        }
    }

    /// Whether the op computes in a wider dtype than it stores.
    pub(crate) fn is_wide_inside(&self) -> bool {
        let narrower = |(compute, store): (DType, DType)| store.size() < compute.size();
        self.compute.zip(self.store).is_some_and(narrower)
    }

    /// The dtype that the result is stored in, if the inputs have none wider than `widest`.
    pub(crate) fn stored(&self, widest: DType) -> DType {
        self.store.or(self.compute).unwrap_or(widest)
    }

    /// This plan, with outputs stored in `dtype`.
    pub const fn store(self, dtype: DType) -> Self {
        Self {
            store: Some(dtype),
            ..self
        }
    }
}
