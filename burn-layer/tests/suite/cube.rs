//! CubeCL's devices, for the tests of the crates above.

#[path = "wgpu.rs"]
mod wgpu;

use burn::tensor::Device;
pub(crate) use wgpu::wgpu;

/// Its CPU runtime where the feature is on, and wgpu.
pub(crate) fn cube_devices() -> Vec<Device> {
    #[allow(unused_mut)]
    let mut devices = Vec::from_iter(wgpu());
    #[cfg(feature = "cpu")]
    devices.push(Device::cpu());
    devices
}
