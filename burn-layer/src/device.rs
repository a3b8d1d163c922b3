//! [`LayeredDevice`]: a device of the backend underneath, with its layer.

use crate::Layer;
use burn_backend::{DeviceId, DeviceOps, DeviceSettings};
use burn_std::device::Device;
use core::fmt;
use std::{
    any::Any,
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, PoisonError, Weak},
};

/// A device of a layered backend. Two are equal when they are the same device under the same layer.
pub struct LayeredDevice<L, D> {
    base: D,
    layer: Arc<L>,
}

impl<L: Layer, D: DeviceOps> LayeredDevice<L, D> {
    /// Put `layer` over `base`.
    pub fn new(base: D, layer: L) -> Self {
        Self::with_shared(base, Arc::new(layer))
    }

    pub(crate) fn with_shared(base: D, layer: Arc<L>) -> Self {
        Self { base, layer }
    }

    /// The device underneath.
    pub fn base(&self) -> &D {
        &self.base
    }

    /// The layer.
    pub fn layer(&self) -> &Arc<L> {
        &self.layer
    }
}

impl<L, D: Clone> Clone for LayeredDevice<L, D> {
    fn clone(&self) -> Self {
        Self {
            base: self.base.clone(),
            layer: self.layer.clone(),
        }
    }
}

impl<L: Layer, D: DeviceOps> Default for LayeredDevice<L, D> {
    fn default() -> Self {
        Self::new(D::default(), L::default())
    }
}

impl<L, D: PartialEq> PartialEq for LayeredDevice<L, D> {
    fn eq(&self, other: &Self) -> bool {
        self.base == other.base && Arc::ptr_eq(&self.layer, &other.layer)
    }
}

impl<L: fmt::Debug, D: fmt::Debug> fmt::Debug for LayeredDevice<L, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {:?}", self.layer, self.base)
    }
}

/// Burn names devices by two 16-bit numbers. The layers that were named so, by their number.
#[derive(Default)]
struct Names {
    by_layer: HashMap<(usize, DeviceId), u16>,
    by_index: HashMap<u16, (Weak<dyn Any + Send + Sync>, DeviceId)>,
    next: u16,
}

static NAMES: LazyLock<Mutex<Names>> = LazyLock::new(Mutex::default);

/// Marks the device ids of layered devices, clear of the type ids that Burn's own backends use.
const LAYERED: u16 = 0x4c00;

impl<L: Layer, D: DeviceOps> Device for LayeredDevice<L, D> {
    fn from_id(id: DeviceId) -> Self {
        let names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        names
            .by_index
            .get(&id.index_id)
            .and_then(|(layer, base)| {
                let layer = layer.upgrade()?.downcast::<L>().ok()?;
                Some(Self::with_shared(D::from_id(*base), layer))
            })
            .unwrap_or_else(|| panic!("no layered device {id} is alive"))
    }

    fn to_id(&self) -> DeviceId {
        let base = self.base.to_id();
        let key = (Arc::as_ptr(&self.layer) as usize, base);
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        // A layer made where a dropped one stood is another layer.
        let known = names.by_layer.get(&key).copied().filter(|index| {
            names.by_index[index]
                .0
                .upgrade()
                .is_some_and(|layer| layer.is::<L>())
        });
        let index = known.unwrap_or_else(|| {
            let index = names.next;
            names.next = index.wrapping_add(1);
            let layer: Weak<dyn Any + Send + Sync> = Arc::downgrade(&self.layer) as _;
            names.by_index.insert(index, (layer, base));
            names.by_layer.insert(key, index);
            index
        });
        DeviceId::new(LAYERED, index)
    }
}

impl<L: Layer, D: DeviceOps> DeviceOps for LayeredDevice<L, D> {
    fn defaults(&self) -> DeviceSettings {
        self.base.defaults()
    }
}
