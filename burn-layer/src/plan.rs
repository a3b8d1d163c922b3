//! [`Plan`]: the dtypes that one op runs in.

use crate::{LayeredFloat, kept::look, rows::Rows, scope::Scope, tensor::Part};
use burn_backend::{Backend, DType, Shape, TensorMetadata};
use std::{any::Any, sync::Arc};

/// The float inputs of an op: what they are stored in, and what the program believes.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The dtype that the program sees: that of the first float input.
    pub nominal: DType,
    /// The dtype that the first float input is stored in.
    pub first: DType,
    /// Whether the first float input comes straight from a transposition of its last two dimensions.
    pub first_transposed: bool,
    /// Whether the last float input does.
    pub last_transposed: bool,
    /// Whether the first float input is a gradient: made of the one that a backward pass begins with.
    pub first_is_gradient: bool,
    /// Whether the last float input is.
    pub last_is_gradient: bool,
    /// Whether the last float input came of a product or another op of a layer, as activations do. Parameters do not, nor what
    /// optimizers and elementwise ops make of them; nor does what the program sent.
    pub last_is_computed: bool,
    /// The narrowest dtype that holds every input's storage dtype (f16 and bf16 together: f32).
    pub widest: DType,
    /// Whether the inputs are stored in more than one dtype.
    pub mixed: bool,
    /// The shapes of the float inputs, in the op's order.
    pub shapes: Vec<Shape>,
    /// Whether there are several inputs, all of them the same tensor: `x * x`, which is how Burn
    /// sends a square.
    pub same: bool,
    /// Whether the first or the last of them is the transposition of the other: `x x^T`.
    pub mirrored: bool,
    /// Whether the second of two is the maximum of the first along a dimension: `x - max(x)`, as the softmax of a model in
    /// training begins.
    pub shifted: bool,
    /// Whether the first of two is what a product has just given, and the second a vector reshaped to a row of it: the sum of
    /// both is a linear layer, which Burn sends so.
    pub biased: bool,
    /// Of an elementwise product of two, one of which is zeros and ones: drawn (`Distribution::Bernoulli`), as Burn sends dropout,
    /// or made of booleans. The dtype that the other is stored in, which holds the product exactly.
    pub masked: Option<DType>,
    /// Of an elementwise product of two, one of which is a sigmoid, as Burn sends `silu` and gates: the dtype that the other is
    /// stored in.
    pub gated: Option<DType>,
    /// Of a product or convolution of backward that makes the gradient of the forward's first float input: the dtype that this
    /// one was stored in. `None` for every other op.
    pub gradient_of: Option<DType>,
    /// Whether the op is a product of backward that makes the gradient of a factor which a batch of matrices shared, as those of a
    /// linear layer do: `x^T dy`, which Burn makes of each matrix, and sums.
    pub of_shared: bool,
    /// Whether the op is a reshape to one dimension. Of a gradient it is, as Burn sends it, the gradient of a vector that was a row: a
    /// bias, for instance, whose gradient has been summed before if there were several rows.
    pub to_vector: bool,
    /// What the first float input may be of something that Burn sends as its parts.
    pub(crate) first_part: Option<Part>,
    /// The scope of the op.
    pub(crate) scope: Option<Arc<Scope>>,
    /// The rows of the first float input.
    pub(crate) first_rows: Arc<Rows>,
    /// The rows of the tensor that it is the transposition of.
    pub(crate) first_columns: Option<Arc<Rows>>,
    /// Those of the last float input.
    pub(crate) last_columns: Option<Arc<Rows>>,
    /// The rows of the last float input.
    pub(crate) last_rows: Arc<Rows>,
}

impl Inputs {
    /// The first input.
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
            first_rows: tensor.rows().clone(),
            first_columns: columns.cloned(),
            last_columns: columns.cloned(),
            last_rows: tensor.rows().clone(),
            ..Self::mask(vec![tensor.shape()], first)
        }
    }

    /// Of zeros and ones that the program draws in that dtype: there is no input but their own kind.
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
            gradient_of: None,
            of_shared: false,
            to_vector: false,
            first_part: None,
            scope: None,
            first_rows: Arc::default(),
            first_columns: None,
            last_columns: None,
            last_rows: Arc::default(),
        }
    }

    /// The inputs as they are; where they differ, all of them in the widest dtype.
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

    /// What `body` makes of the value of type `T` that is [kept](crate::Kept) with the tensor that the first float input is the
    /// transposition of, if there are both.
    pub fn kept_with_transposed<T: Any, R>(&self, body: impl FnOnce(&T) -> R) -> Option<R> {
        look(&self.first_columns.as_ref()?.kept, body)
    }

    /// The same of the last float input.
    pub fn kept_with_last_transposed<T: Any, R>(&self, body: impl FnOnce(&T) -> R) -> Option<R> {
        look(&self.last_columns.as_ref()?.kept, body)
    }

    /// What `body` makes of the value of type `T` that is [kept](crate::Kept) with the last float input, if there is one.
    pub fn kept_with_last<T: Any, R>(&self, body: impl FnOnce(&T) -> R) -> Option<R> {
        look(&self.last_rows.kept, body)
    }

    /// One more input, which is the same tensor as those before or not.
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
        self.masked = beside(Part::Mask).filter(|_| two);
        self.gated = beside(Part::Gate).filter(|_| two);
        self.shapes.push(shape);
        self.last_transposed = tensor.columns().is_some();
        self.last_columns = tensor.columns().cloned();
        self.last_rows = tensor.rows().clone();
        self.last_is_gradient = tensor.is_gradient();
        self.last_is_computed = tensor.is_computed();
        self.mixed |= self.widest != storage || storage != tensor.storage_dtype();
        self.widest = widest(self.widest, storage);
        self.same = same;
        let are = |columns: Option<&Arc<Rows>>, rows: &Arc<Rows>| {
            columns.is_some_and(|columns| Arc::ptr_eq(columns, rows))
        };
        self.mirrored = are(tensor.columns(), &self.first_rows)
            || are(self.first_columns.as_ref(), tensor.rows());
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

/// The dtypes that one op runs in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The dtype that every float input is cast to first. `None`: as they are.
    pub compute: Option<DType>,
    /// The dtype that float outputs are stored in. `None`: as computed.
    pub store: Option<DType>,
    /// Whether the layer [runs](crate::Layer::run) the op itself, with the inputs as they are stored.
    pub own: bool,
    /// Whether what the op makes of an activation may be given up and computed again where it is needed once more, as in
    /// backward: the same op on the same inputs. (Backends that fuse ops may round it otherwise the second time.) It is given up where
    /// the op is [cheap](crate::Op::is_cheap) and keeping its inputs takes less than keeping its result: one of them is of the result's
    /// size, in a narrower dtype or kept in any case, as by Burn's autodiff; the others are small.
    pub recompute: bool,
    /// Whether a product that [makes the gradient of a shared factor](Inputs::of_shared) waits for the sum over its batch, and is then
    /// made of all rows of the batch at once, as PyTorch does. No product of each matrix is written.
    pub over_batch: bool,
}

impl Plan {
    /// Run in `dtype` and keep the output as computed.
    pub const fn compute(dtype: DType) -> Self {
        Self {
            compute: Some(dtype),
            store: None,
            own: false,
            recompute: false,
            over_batch: false,
        }
    }

    /// The layer runs the op itself.
    pub const fn own() -> Self {
        Self {
            compute: None,
            store: None,
            own: true,
            recompute: false,
            over_batch: false,
        }
    }

    /// Make a gradient that is summed over a batch [at once](Self::over_batch).
    pub const fn over_batch(self) -> Self {
        Self {
            over_batch: true,
            ..self
        }
    }

    /// Whether the op is computed in a wider dtype than its result is stored in.
    pub(crate) fn is_wide_inside(&self) -> bool {
        let narrower = |(compute, store): (DType, DType)| store.size() < compute.size();
        self.compute.zip(self.store).is_some_and(narrower)
    }

    /// Store the outputs in `dtype`.
    pub const fn store(self, dtype: DType) -> Self {
        Self {
            store: Some(dtype),
            ..self
        }
    }
}
