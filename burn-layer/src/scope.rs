//! [`scoped`]: telling layers which part of the program an op belongs to.

use crate::scopes::Open;
use std::{any::Any, fmt, sync::Arc};

type Value = Arc<dyn Any + Send + Sync>;

/// Runs `body`. For every op that it starts, the layers [see](crate::Inputs::scope) `value`.
///
/// Scopes nest and belong to the calling thread. They reach into backward: the backward of a matrix product, and of every op
/// that has [backward ops of its own](crate::Op::backward), is in the scope of its forward, wherever `backward` is called,
/// even in another scope. The rest of backward (elementwise ops, sums, moves) is in the scope that `backward` is called in.
/// So are the ops that gradient checkpointing computes again, except activation functions with backward ops of their own.
///
/// Backward is told from forward by its tensors: those computed from the one that `backward` begins with, provided that the loss
/// has one element. (With a loss of more elements, the backward of products counts as forward.) The forward of a product of
/// backward is taken to be the last op that its weight, or its other factor, was used in.
///
/// Tensors that gradient checkpointing has computed again are not known to have been used before. Even so, the gradient of a
/// weight, `x^T dy`, is in the scope of its forward if the gradient of `x`, `dy w^T`, was computed just before, because that
/// product recognizes the forward by the weight. Two cases remain in which it is in the scope that `backward` is called in: the
/// weight is the left factor, or the weight was computed again as well, as the transposition of a parameter is.
///
/// Use few values that live long, such as statics. Two scopes are the same to backward if they are of the same `Arc`, and a
/// parameter remembers each scope that it was used in.
///
/// ```
/// use burn::tensor::{DType, Device, Tensor};
/// use burn_layer::{Inputs, Layer, Layers, Op, Plan, scoped};
/// use std::sync::Arc;
///
/// struct Precise;
///
/// /// bf16, except where `Precise` is asked for.
/// #[derive(Debug)]
/// struct Low;
/// impl Layer for Low {
///     fn plan(&self, _op: Op, inputs: &Inputs) -> Option<Plan> {
///         let precise = inputs.scope::<Precise>().is_some();
///         Some(Plan::compute(if precise { DType::F32 } else { DType::BF16 }))
///     }
/// }
///
/// let device = Layers::on(Device::flex()).layer(Low).serve()?;
/// let x = Tensor::<1>::from_floats([1.0], &device);
/// let add = || x.clone().add_scalar(0.001).into_scalar::<f32>();
/// assert_eq!(add(), 1.0);
/// assert_eq!(scoped(&Arc::new(Precise), add), 1.001);
/// assert_eq!(add(), 1.0);
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
pub fn scoped<T: Any + Send + Sync, R>(value: &Arc<T>, body: impl FnOnce() -> R) -> R {
    let _open = Open::new(value.clone());
    body()
}

/// A scope that is or was open somewhere.
pub(crate) struct Scope {
    value: Value,
    outer: Option<Arc<Scope>>,
}

impl Scope {
    pub(crate) fn new(value: Value, outer: Option<Arc<Scope>>) -> Self {
        Self { value, outer }
    }

    /// This scope and those around it, the innermost first.
    fn outward(&self) -> impl Iterator<Item = &Self> {
        core::iter::successors(Some(self), |scope| scope.outer.as_deref())
    }

    /// The values of type `T`, the innermost first.
    pub(crate) fn values<T: Any>(&self) -> impl Iterator<Item = &T> {
        self.outward()
            .filter_map(|scope| scope.value.downcast_ref())
    }
}

/// Scopes are equal if they are of the same values, which have the same address.
impl PartialEq for Scope {
    fn eq(&self, other: &Self) -> bool {
        let addresses = |scope: &Self| -> Vec<*const ()> {
            let values = scope.outward().map(|scope| Arc::as_ptr(&scope.value));
            values.map(<*const _>::cast).collect()
        };
        addresses(self) == addresses(other)
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").finish_non_exhaustive()
    }
}

/// The values of type `T` of a scope and of those around it, the outermost first.
pub(crate) fn values<T: Any>(scope: Option<&Scope>) -> Vec<&T> {
    let mut values: Vec<&T> = scope.map_or_else(Vec::new, |scope| scope.values().collect());
    values.reverse();
    values
}
