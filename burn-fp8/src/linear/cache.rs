//! The codes of a weight, kept for the later micro-batches of a step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::Device;

use crate::Fp8Tensor;

/// Forgets its content whenever the module that holds it may get another weight: when it is mapped (as by an optimizer or
/// a record) or moved. Clones start empty.
#[derive(Debug, Default)]
pub(super) struct WeightCache(Arc<Mutex<Option<Fp8Tensor<2>>>>);

impl WeightCache {
    pub(super) fn get(&self) -> Option<Fp8Tensor<2>> {
        self.lock().clone()
    }

    pub(super) fn set(&self, weight: Option<Fp8Tensor<2>>) {
        *self.lock() = weight;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Fp8Tensor<2>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clone for WeightCache {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Module for WeightCache {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _device: &Device) -> Self {
        Self::default()
    }

    fn to_device(self, _device: &Device) -> Self {
        Self::default()
    }

    fn train(self) -> Self {
        Self::default()
    }

    fn valid(&self) -> Self {
        Self::default()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {}

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        Self::default()
    }
}

impl ModuleDisplayDefault for WeightCache {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&"WeightCache").optional()
    }
}

impl ModuleDisplay for WeightCache {}
