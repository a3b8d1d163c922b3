//! [`scoped`]: telling layers which part of the program an op belongs to.
//!
//! The ops of a layered device run on a thread of the device, in the order in which the program
//! started them. Each op carries the stream that it was started on, so a scope is a stream
//! of its own. The layers recognize the scope by it; the backend underneath is given the stream that
//! the thread had outside all scopes, so that scopes add no synchronization.

use burn_std::id::StreamId;
use std::{
    any::Any,
    collections::HashMap,
    fmt,
    sync::{
        Arc, LazyLock, PoisonError, RwLock, RwLockWriteGuard,
        atomic::{AtomicBool, Ordering},
    },
};

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
/// Use few values that live long, such as statics: what is needed to recognize a value
/// is kept as long as the process lives, once for each value and thread.
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
    stream_in(value.clone()).executes(body)
}

/// A scope that is or was open somewhere.
pub(crate) struct Scope {
    value: Value,
    outer: Option<Arc<Scope>>,
    /// The stream outside all scopes.
    pub(crate) stream: StreamId,
}

impl Scope {
    /// The values of type `T` of this scope and those around it, innermost first.
    pub(crate) fn values<T: Any>(&self) -> impl Iterator<Item = &T> {
        core::iter::successors(Some(self), |scope| scope.outer.as_deref())
            .filter_map(|scope| scope.value.downcast_ref())
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Scopes {
    by_stream: HashMap<StreamId, Arc<Scope>>,
    /// The stream for a value that is scoped on another stream. The key is that stream and the address of the value, which is
    /// never reused because the scope keeps the value.
    streams: HashMap<(StreamId, usize), StreamId>,
}

static SCOPES: LazyLock<RwLock<Scopes>> = LazyLock::new(RwLock::default);

/// Whether there are any scopes. With it, programs without scopes pay for one load per op.
static ANY: AtomicBool = AtomicBool::new(false);

fn write() -> RwLockWriteGuard<'static, Scopes> {
    SCOPES.write().unwrap_or_else(PoisonError::into_inner)
}

fn stream_in(value: Value) -> StreamId {
    let outside = StreamId::current();
    let key = (outside, Arc::as_ptr(&value).cast::<()>() as usize);
    let mut scopes = write();
    if let Some(inside) = scopes.streams.get(&key) {
        return *inside;
    }
    let outer = scopes.by_stream.get(&outside).cloned();
    let inside = StreamId::allocate();
    let scope = Scope {
        value,
        stream: outer.as_ref().map_or(outside, |outer| outer.stream),
        outer,
    };
    scopes.by_stream.insert(inside, Arc::new(scope));
    scopes.streams.insert(key, inside);
    ANY.store(true, Ordering::Release);
    inside
}

/// The values of type `T` of `scope` and those around it, outermost first.
pub(crate) fn values<T: Any>(scope: Option<&Scope>) -> Vec<&T> {
    let mut values: Vec<&T> = scope.map_or_else(Vec::new, |scope| scope.values().collect());
    values.reverse();
    values
}

/// Whether any scope was ever opened.
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Acquire)
}

/// The scope that the calling thread is in, and the stream that the thread has outside all scopes.
pub(crate) fn current() -> (Option<Arc<Scope>>, StreamId) {
    let stream = StreamId::current();
    if !any() {
        return (None, stream);
    }
    let scopes = SCOPES.read().unwrap_or_else(PoisonError::into_inner);
    match scopes.by_stream.get(&stream) {
        Some(scope) => (Some(scope.clone()), scope.stream),
        None => (None, stream),
    }
}
