//! The layers of one device.

use crate::{Cast, FloatView, Inputs, Layer, Made, Op, Plan, Reduced};
use burn_backend::{DType, DeviceId, distributed::ReduceOperation};
use core::{
    any::Any,
    fmt,
    sync::atomic::{AtomicUsize, Ordering},
};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// The layers of a device, the first one innermost. They can be taken off, and others put on, once
/// none of the device's tensors lives.
pub(crate) struct LayerSet {
    /// The number of the device that they are over.
    pub(crate) index: u16,
    stack: RwLock<Stack>,
    /// How many tensors the device has.
    tensors: AtomicUsize,
}

/// What is on a device.
#[derive(Default)]
pub(crate) struct Stack {
    pub(crate) layers: Vec<Box<dyn Layer>>,
    /// The custom ops, of the type that the service knows.
    pub(crate) custom_ops: Option<Box<dyn Any + Send + Sync>>,
}

impl LayerSet {
    pub(crate) fn new(index: u16, stack: Stack) -> Self {
        Self {
            index,
            stack: RwLock::new(stack),
            tensors: AtomicUsize::new(0),
        }
    }

    /// Takes off what is there and puts `stack` on.
    pub(crate) fn replace(&self, stack: Stack) {
        *self.stack.write().unwrap_or_else(PoisonError::into_inner) = stack;
    }

    pub(crate) fn hold(&self) {
        self.tensors.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn release(&self) {
        self.tensors.fetch_sub(1, Ordering::Release);
    }

    /// How many tensors the device has.
    pub(crate) fn tensors(&self) -> usize {
        self.tensors.load(Ordering::Acquire)
    }

    fn stack(&self) -> RwLockReadGuard<'_, Stack> {
        self.stack.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something of the custom ops, when they are of type `T`.
    pub(crate) fn custom_ops<T: 'static, R>(&self, get: impl FnOnce(&T) -> R) -> Option<R> {
        let stack = self.stack();
        let ops = stack.custom_ops.as_ref()?.downcast_ref::<T>()?;
        Some(get(ops))
    }

    pub(crate) fn plan(&self, op: Op, inputs: &Inputs) -> Plan {
        let stack = self.stack();
        let mut layers = stack.layers.iter().rev();
        layers
            .find_map(|layer| layer.plan(op, inputs))
            .unwrap_or_else(|| inputs.promote())
    }

    pub(crate) fn ran(&self, op: Op, dtype: DType) {
        self.stack().layers.iter().for_each(|l| l.ran(op, dtype));
    }

    pub(crate) fn cast(&self, cast: Cast) {
        self.stack().layers.iter().for_each(|l| l.cast(cast));
    }

    pub(crate) fn stored(&self, dtype: DType, nominal: DType, elements: usize) {
        let stack = self.stack();
        let layers = stack.layers.iter();
        layers.for_each(|layer| layer.stored(dtype, nominal, elements));
    }

    pub(crate) fn watches(&self) -> bool {
        self.stack().layers.iter().any(|layer| layer.watches())
    }

    pub(crate) fn made(&self, made: &Made<'_>) {
        let stack = self.stack();
        let layers = stack.layers.iter();
        layers
            .filter(|layer| layer.watches())
            .for_each(|layer| layer.made(made));
    }

    pub(crate) fn all_reduce(
        &self,
        tensor: FloatView<'_>,
        op: ReduceOperation,
        devices: &[DeviceId],
    ) -> Option<Reduced> {
        let stack = self.stack();
        let mut layers = stack.layers.iter().rev();
        layers.find_map(|layer| layer.all_reduce(tensor, op, devices))
    }

    pub(crate) fn sync_collective(&self) -> bool {
        let stack = self.stack();
        let mut layers = stack.layers.iter().rev();
        layers.any(|layer| layer.sync_collective())
    }
}

impl fmt::Debug for LayerSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.stack().layers).finish()
    }
}
