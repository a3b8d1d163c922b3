//! [`LayeredDevice`]: a device of the backend underneath, with its layers.

use crate::{Layer, LayerSet, layer_set::Stack};
use burn_backend::{DeviceId, DeviceOps, DeviceSettings};
use burn_std::device::Device;
use core::fmt;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Weak},
};

/// A device of a layered backend. Two are equal when they are the same device under the same layers.
#[derive(Clone)]
pub struct LayeredDevice<D> {
    base: D,
    layer: Arc<LayerSet>,
}

impl<D: DeviceOps> LayeredDevice<D> {
    /// Puts `layers` over `base`, the first one innermost.
    pub fn new(base: D, layers: impl IntoIterator<Item = Box<dyn Layer>>) -> Self {
        let mut names = names();
        let index = unused_index(&names);
        let layers = Arc::new(LayerSet::new(
            index,
            Stack {
                layers: layers.into_iter().collect(),
                custom_ops: None,
            },
        ));
        names.insert(index, (Arc::downgrade(&layers), base.to_id()));
        drop(names);
        Self::with_shared(base, layers)
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

/// The type id of layered devices. None of Burn's own backends uses it.
const LAYERED: u16 = 0x4c00;

/// The layered devices that are alive. Burn identifies a device by two 16-bit numbers, type and index; the key is the index.
type Names = HashMap<u16, (Weak<LayerSet>, DeviceId)>;

static NAMES: LazyLock<Mutex<Names>> = LazyLock::new(Mutex::default);

fn names() -> MutexGuard<'static, Names> {
    NAMES.lock()
}

/// An index that no living layered device has.
fn unused_index(names: &Names) -> u16 {
    let free = (0..=u16::MAX).find(|index| !names.contains_key(index));
    free.expect("fewer than 65,536 layered devices at a time")
}

impl Drop for LayerSet {
    fn drop(&mut self) {
        names().remove(&self.index);
    }
}

impl<D: DeviceOps> Device for LayeredDevice<D> {
    fn from_id(id: DeviceId) -> Self {
        let found = names().get(&id.index_id).cloned();
        found
            .and_then(|(layers, base)| Some(Self::with_shared(D::from_id(base), layers.upgrade()?)))
            .unwrap_or_else(|| panic!("no layered device {id} is alive"))
    }

    fn to_id(&self) -> DeviceId {
        DeviceId::new(LAYERED, self.layer.index)
    }
}

impl<D: DeviceOps> DeviceOps for LayeredDevice<D> {
    fn defaults(&self) -> DeviceSettings {
        let own = self.layer.defaults.get();
        own.copied().unwrap_or_else(|| self.base.defaults())
    }
}
