//! The layers of one device.

use crate::{
    Cast, FloatView, Inputs, Layer, Made, Op, Plan, Ran, Reduced, Run, ends::Ends, float::Copied,
    mechanisms::Mechanisms, ops::LastProduct, recent::Recent, recompute::Recomputed,
    scopes::Scopes, seen::Seen,
};
use burn_backend::{DType, DeviceId, DeviceSettings, distributed::ReduceOperation};
use burn_std::id::StreamId;
use core::{
    any::Any,
    fmt,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::sync::{Arc, OnceLock, Weak};

/// How many [copies](Recent) are kept: as many as a transformer block goes back to, such as the common input of queries, keys and
/// values, and the scores, which are used for their maximum and then for the difference from it.
const COPIES: usize = 4;

/// How many values that can be computed again are kept: as many as the ops of a softmax or a norm go back to.
const VALUES: usize = 2;

/// The same over a backend that fuses ops. A value that is kept when its kernel ends is written to memory, while one that is
/// computed again in the kernel that needs it is not even read. One is kept, so that a reduction and the op that takes its
/// result can be one kernel.
const FUSED_VALUES: usize = 1;

/// The layers of a device, the first one innermost. They can be [taken off](Self::take_off), and
/// others [put on](Self::put_on), once none of the device's tensors lives.
pub(crate) struct LayerSet {
    /// The index of the layered device, as in its device id.
    pub(crate) index: u16,
    /// The dtypes of tensors that the program creates without naming one. If unset, those of the device underneath.
    pub(crate) defaults: OnceLock<DeviceSettings>,
    stack: RwLock<Option<Stack>>,
    /// How many tensors the device has.
    tensors: AtomicUsize,
    /// The scopes that ops are in.
    pub(crate) scopes: Scopes,
    /// The streams on which backward is running, as far as the ops tell.
    backward: Mutex<Seen>,
    /// Whether the backend underneath fuses ops.
    fused: AtomicBool,
    /// Whether the backend underneath computes on NVIDIA GPUs, where some of its kernels are slow, or do not run.
    cuda: AtomicBool,
    /// What computes some ops in place of the backend underneath.
    pub(crate) mechanisms: Mechanisms,
    /// What a batch normalization's backward sums.
    pub(crate) last_product: LastProduct,
    /// The dtype of 16 bits that a tensor in f32 was cast to last.
    low: Mutex<Option<DType>>,
    /// Whether a layer ran ops itself.
    owns: AtomicBool,
    /// Kernels that end before the next op of a network.
    pub(crate) ends: Ends,
    /// What else is computed before the program synchronizes the device.
    pub(crate) pending: Ends,
    /// Copies in another dtype.
    copies: Recent,
    /// Tensors that can be computed again.
    values: Recent,
}

/// The layers and custom ops of a device.
pub(crate) struct Stack {
    pub(crate) layers: Vec<Box<dyn Layer>>,
    /// The custom ops, in a type that the service knows.
    pub(crate) custom_ops: Option<Box<dyn Any + Send + Sync>>,
}

impl LayerSet {
    pub(crate) fn new(index: u16, stack: Stack) -> Self {
        Self {
            index,
            defaults: OnceLock::new(),
            stack: RwLock::new(Some(stack)),
            tensors: AtomicUsize::new(0),
            scopes: Scopes::default(),
            backward: Mutex::default(),
            fused: AtomicBool::new(false),
            cuda: AtomicBool::new(false),
            mechanisms: Mechanisms::default(),
            last_product: LastProduct::default(),
            low: Mutex::default(),
            owns: AtomicBool::new(false),
            ends: Ends::default(),
            pending: Ends::default(),
            copies: Recent::new(COPIES),
            values: Recent::new(VALUES),
        }
    }

    pub(crate) fn put_on(&self, stack: Stack) {
        *self.backward() = Seen::default();
        *self.low.lock() = None;
        self.owns.store(false, Ordering::Relaxed);
        *self.stack.write() = Some(stack);
    }

    pub(crate) fn take_off(&self) {
        *self.stack.write() = None;
        self.ends.clear();
        self.pending.clear();
    }

    /// Computes the products of this thread's stream that wait: a program that synchronizes, such as one that takes times, means them too.
    pub(crate) fn compute_pending(&self) {
        self.ends.now();
        self.pending.now();
    }

    /// Records that the backend underneath fuses ops.
    pub(crate) fn set_fused(&self) {
        self.fused.store(true, Ordering::Relaxed);
        self.values.keep_so_many(FUSED_VALUES);
    }

    /// Whether the backend underneath fuses ops.
    pub(crate) fn is_fused(&self) -> bool {
        self.fused.load(Ordering::Relaxed)
    }

    /// Records that the backend underneath computes on NVIDIA GPUs.
    pub(crate) fn set_on_cuda(&self) {
        self.cuda.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_on_cuda(&self) -> bool {
        self.cuda.load(Ordering::Relaxed)
    }

    pub(crate) fn hold(&self) {
        self.tensors.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn release(&self) {
        self.tensors.fetch_sub(1, Ordering::Release);
    }

    fn backward(&self) -> MutexGuard<'_, Seen> {
        self.backward.lock()
    }

    /// Whether, of the ops of this thread's stream, the last one of which this could be told was part of backward.
    pub(crate) fn is_in_backward(&self) -> bool {
        self.backward().contains(StreamId::current())
    }

    pub(crate) fn set_in_backward(&self, backward: bool) {
        let stream = StreamId::current();
        match backward {
            true => self.backward().insert(stream),
            false => self.backward().remove(stream),
        }
    }

    /// Keeps the copy of a tensor until newer ones replace it. The caller must not have it locked.
    pub(crate) fn keep_for_now<P: Send + 'static>(&self, copied: &Copied<P>) {
        let copied: Weak<Mutex<Option<(DType, P)>>> = Arc::downgrade(copied);
        self.copies.keep(copied);
    }

    /// Keeps a tensor that can be computed again until newer ones replace it. The caller must not have it locked.
    pub(crate) fn keep_value_for_now<P: Send + 'static>(&self, value: &Arc<Recomputed<P>>) {
        let value: Weak<Recomputed<P>> = Arc::downgrade(value);
        self.values.keep(value);
    }

    /// How many tensors the device has.
    pub(crate) fn tensors(&self) -> usize {
        self.tensors.load(Ordering::Acquire)
    }

    /// Calls `ask` with the layers and custom ops of the device. Panics if they were taken off: that ends the session, so that
    /// the program is told.
    fn with<R>(&self, ask: impl FnOnce(&Stack) -> R) -> R {
        let stack = self.stack.read();
        ask(stack.as_ref().expect(
            "the layered device went with its lease: keep the lease for as long as the device",
        ))
    }

    /// Calls `get` with the custom ops, if they are of type `T`.
    pub(crate) fn custom_ops<T: 'static, R>(&self, get: impl FnOnce(&T) -> R) -> Option<R> {
        self.with(|stack| Some(get(stack.custom_ops.as_ref()?.downcast_ref::<T>()?)))
    }

    pub(crate) fn plan(&self, op: Op, inputs: &Inputs) -> Plan {
        self.with(|stack| {
            let mut layers = stack.layers.iter().rev();
            layers.find_map(|layer| layer.plan(op, inputs))
        })
        .unwrap_or_else(|| inputs.promote())
    }

    pub(crate) fn run(&self, run: &Run<'_>) -> Option<Ran> {
        let ran = self.with(|stack| {
            let mut layers = stack.layers.iter().rev();
            layers.find_map(|layer| layer.run(run))
        });
        self.owns.fetch_or(ran.is_some(), Ordering::Relaxed);
        ran
    }

    /// Whether a layer ran ops itself, such as products, for which it casts tensors as it likes.
    pub(crate) fn owns(&self) -> bool {
        self.owns.load(Ordering::Relaxed)
    }

    pub(crate) fn ran(&self, op: Op, dtype: DType) {
        self.with(|stack| stack.layers.iter().for_each(|layer| layer.ran(op, dtype)));
    }

    pub(crate) fn recomputed(&self, op: Op) {
        self.with(|stack| stack.layers.iter().for_each(|layer| layer.recomputed(op)));
    }

    /// The dtype of 16 bits that the layers have had a tensor in f32 cast to last, if any.
    pub(crate) fn low(&self) -> Option<DType> {
        *self.low.lock()
    }

    pub(crate) fn cast(&self, cast: Cast) {
        if cast.from == DType::F32 && cast.to.size() == 2 {
            *self.low.lock() = Some(cast.to);
        }
        self.with(|stack| stack.layers.iter().for_each(|layer| layer.cast(cast)));
    }

    pub(crate) fn stored(&self, dtype: DType, nominal: DType, elements: usize) {
        self.with(|stack| {
            let layers = stack.layers.iter();
            layers.for_each(|layer| layer.stored(dtype, nominal, elements));
        });
    }

    pub(crate) fn watches(&self) -> bool {
        self.with(|stack| stack.layers.iter().any(|layer| layer.watches()))
    }

    pub(crate) fn made(&self, made: &Made<'_>) {
        self.with(|stack| {
            let watching = stack.layers.iter().filter(|layer| layer.watches());
            watching.for_each(|layer| layer.made(made));
        });
    }

    pub(crate) fn all_reduce(
        &self,
        tensor: FloatView<'_>,
        op: ReduceOperation,
        devices: &[DeviceId],
    ) -> Option<Reduced> {
        self.with(|stack| {
            let mut layers = stack.layers.iter().rev();
            layers.find_map(|layer| layer.all_reduce(tensor, op, devices))
        })
    }

    pub(crate) fn sync_collective(&self) -> bool {
        self.with(|stack| {
            stack
                .layers
                .iter()
                .rev()
                .any(|layer| layer.sync_collective())
        })
    }
}

impl fmt::Debug for LayerSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stack = self.stack.read();
        let layers = stack.iter().flat_map(|stack| &stack.layers);
        f.debug_list().entries(layers).finish()
    }
}
