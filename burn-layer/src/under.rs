//! [`device_under`]: the device that a layered device lies over.

use burn::tensor::Device;
use parking_lot::{Mutex, MutexGuard};

/// The layered devices that this process has served, each with the one underneath.
static SERVED: Mutex<Vec<(Device, Device)>> = Mutex::new(Vec::new());

fn served() -> MutexGuard<'static, Vec<(Device, Device)>> {
    SERVED.lock()
}

/// Records the device underneath a layered device. A device that takes over another's service lies over the same device, so there
/// is one entry for each service.
pub(crate) fn remember(layered: Device, under: Device) {
    let mut served = served();
    if !served.iter().any(|(known, _)| *known == layered) {
        served.push((layered, under));
    }
}

/// The device that a layered device of this process lies over, without autodiff. `None` for any other device.
///
/// ```
/// use burn::tensor::Device;
/// use burn_layer::{Layers, device_under};
///
/// let device = Layers::on(Device::flex()).serve()?.autodiff();
/// assert_eq!(device_under(&device), Some(Device::flex()));
/// assert_eq!(device_under(&Device::flex()), None);
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
pub fn device_under(device: &Device) -> Option<Device> {
    let layered = device.clone().without_autodiff();
    let served = served();
    let entry = served.iter().find(|(known, _)| *known == layered);
    entry.map(|(_, under)| under.clone())
}
