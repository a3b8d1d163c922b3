//! The plain devices that the tests run on.

use burn::tensor::Device;

/// Flex and wgpu. Not CubeCL's CPU runtime, which compiles kernels for long.
pub(crate) fn devices() -> Vec<Device> {
    [Device::flex()].into_iter().chain(wgpu()).collect()
}

/// CubeCL's: its CPU runtime where the feature is on, and wgpu.
pub(crate) fn cube_devices() -> Vec<Device> {
    #[allow(unused_mut)]
    let mut devices = Vec::from_iter(wgpu());
    #[cfg(feature = "cpu")]
    devices.push(Device::cpu());
    devices
}

/// Where its feature is on and there is an adapter.
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
