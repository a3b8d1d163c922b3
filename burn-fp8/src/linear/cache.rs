//! The codes of a weight, kept for the later micro-batches of a step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::Dispatch;
use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::Device;

use crate::{Fp8Tensor, Operand};

/// A weight in fp8, and its transpose: the two ways in which a layer's products read it.
#[derive(Clone, Debug)]
pub(super) struct CastWeight {
    pub(super) codes: Fp8Tensor<2>,
    pub(super) transposed: Fp8Tensor<2>,
}

impl From<CastWeight> for Operand<Dispatch> {
    fn from(CastWeight { codes, transposed }: CastWeight) -> Self {
        Self {
            scale: codes.scale().reshape([1]).into_dispatch(),
            granularity: codes.granularity(),
            format: codes.format(),
            codes: codes.codes().into_dispatch(),
            transposed: transposed.codes().into_dispatch(),
        }
    }
}

/// Forgets its content whenever the module that holds it may get another weight: when it is mapped (as by an optimizer or
/// a record) or moved. Clones start empty.
#[derive(Debug, Default)]
pub(super) struct WeightCache(Arc<Mutex<Option<CastWeight>>>);

impl WeightCache {
    pub(super) fn get(&self) -> Option<CastWeight> {
        self.lock().clone()
    }

    pub(super) fn set(&self, weight: Option<CastWeight>) {
        *self.lock() = weight;
    }

    fn lock(&self) -> MutexGuard<'_, Option<CastWeight>> {
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
