//! [`LayeredDevice`]: a device of the backend underneath, with its layer.

use crate::{Layer, LayerSet};
use burn_backend::{DeviceId, DeviceOps, DeviceSettings};
use burn_std::device::Device;
use core::fmt;
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, PoisonError, Weak},
};

/// A device of a layered backend. Two are equal when they are the same device under the same layer.
pub struct LayeredDevice<D> {
    base: D,
    layer: Arc<LayerSet>,
}

impl<D: DeviceOps> LayeredDevice<D> {
    /// Put `layers` over `base`, the first one innermost.
    pub fn new(base: D, layers: impl IntoIterator<Item = Box<dyn Layer>>) -> Self {
        Self::with_shared(base, Arc::new(layers.into_iter().collect()))
    }

    pub(crate) fn with_shared(base: D, layer: Arc<LayerSet>) -> Self {
        Self { base, layer }
    }

    /// The device underneath.
    pub fn base(&self) -> &D {
        &self.base
    }

    /// The layers.
    pub(crate) fn layer(&self) -> &Arc<LayerSet> {
        &self.layer
    }
}

impl<D: Clone> Clone for LayeredDevice<D> {
    fn clone(&self) -> Self {
        Self {
            base: self.base.clone(),
            layer: self.layer.clone(),
        }
    }
}

impl<D: DeviceOps> Default for LayeredDevice<D> {
    fn default() -> Self {
        Self::new(D::default(), [])
    }
}

impl<D: PartialEq> PartialEq for LayeredDevice<D> {
    fn eq(&self, other: &Self) -> bool {
        self.base == other.base && Arc::ptr_eq(&self.layer, &other.layer)
    }
}

impl<D: fmt::Debug> fmt::Debug for LayeredDevice<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {:?}", self.layer, self.base)
    }
}

/// Burn names devices by two 16-bit numbers. The layers that were named so, by their number.
#[derive(Default)]
struct Names {
    by_layer: HashMap<(usize, DeviceId), u16>,
    by_index: HashMap<u16, (Weak<LayerSet>, DeviceId)>,
    next: u16,
}

static NAMES: LazyLock<Mutex<Names>> = LazyLock::new(Mutex::default);

/// Marks the device ids of layered devices, clear of the type ids that Burn's own backends use.
const LAYERED: u16 = 0x4c00;

impl<D: DeviceOps> Device for LayeredDevice<D> {
    fn from_id(id: DeviceId) -> Self {
        let names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        names
            .by_index
            .get(&id.index_id)
            .and_then(|(layer, base)| Some(Self::with_shared(D::from_id(*base), layer.upgrade()?)))
            .unwrap_or_else(|| panic!("no layered device {id} is alive"))
    }

    fn to_id(&self) -> DeviceId {
        let base = self.base.to_id();
        let key = (Arc::as_ptr(&self.layer) as usize, base);
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        // A layer made where a dropped one stood is another layer.
        let known = names
            .by_layer
            .get(&key)
            .copied()
            .filter(|index| names.by_index[index].0.strong_count() > 0);
        let index = known.unwrap_or_else(|| {
            let index = names.next;
            names.next = index.wrapping_add(1);
            names
                .by_index
                .insert(index, (Arc::downgrade(&self.layer), base));
            names.by_layer.insert(key, index);
            index
        });
        DeviceId::new(LAYERED, index)
    }
}

impl<D: DeviceOps> DeviceOps for LayeredDevice<D> {
    fn defaults(&self) -> DeviceSettings {
        self.base.defaults()
    }
}
