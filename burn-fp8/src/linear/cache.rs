//! The codes of a weight, kept for the later micro-batches of a step.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    ParamId,
};
use burn::tensor::Device;
use parking_lot::Mutex;

use crate::{Fp8Cast, Operand, recipe::Fp8Recipe};

/// Identifies one cast of a weight. Equal casts may have different scales under different recipes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CastKey {
    pub(super) weight: ParamId,
    pub(super) recipe: Fp8Recipe,
    pub(super) cast: Fp8Cast,
}

type Casts = Vec<(CastKey, Operand<Dispatch>)>;

/// Forgets its content whenever the module that holds it may get another weight: when the module is mapped (as by an optimizer or
/// a record) or moved. Clones start empty.
#[derive(Debug, Default)]
pub(super) struct WeightCache(Arc<Mutex<Casts>>);

impl WeightCache {
    pub(super) fn get(&self, key: &CastKey) -> Option<Operand<Dispatch>> {
        let casts = self.0.lock();
        let (_, operand) = casts.iter().find(|(kept, _)| kept == key)?;
        Some(operand.clone())
    }

    pub(super) fn keep(&self, key: CastKey, operand: Operand<Dispatch>) {
        self.0.lock().push((key, operand));
    }

    pub(super) fn clear(&self) {
        self.0.lock().clear();
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
