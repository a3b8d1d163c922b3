//! WebGPU, for the tests of all crates.

use burn::tensor::Device;

/// Its default adapter, where the feature is on and there is one.
pub(crate) fn wgpu() -> Option<Device> {
    #[cfg(feature = "wgpu")]
    {
        use burn::tensor::{DeviceKind, DeviceType};

        if !Device::enumerate(DeviceType::Wgpu).is_empty() {
            return Some(Device::wgpu(DeviceKind::DefaultDevice));
        }
        eprintln!("no adapter for wgpu on this machine: wgpu is skipped");
    }
    None
}
