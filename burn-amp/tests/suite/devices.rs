//! The plain devices that the tests run on.

#[path = "../../../burn-layer/tests/suite/wgpu.rs"]
mod wgpu;

use burn::tensor::Device;
pub(crate) use wgpu::wgpu;

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
