//! The plain devices that the tests run on.

#[path = "cuda.rs"]
mod cuda;
#[path = "wgpu.rs"]
mod wgpu;

use burn::tensor::Device;
use cuda::cuda;
use wgpu::wgpu;

/// Flex, and wgpu's default adapter and an NVIDIA GPU, each where its feature is on and there is one.
pub(crate) fn devices() -> Vec<Device> {
    let gpus = wgpu().into_iter().chain(cuda());
    [Device::flex()].into_iter().chain(gpus).collect()
}

/// These, and CubeCL's CPU runtime where its feature is on.
pub(crate) fn devices_and_cpu() -> Vec<Device> {
    #[allow(unused_mut)]
    let mut devices = devices();
    #[cfg(feature = "cpu")]
    devices.push(Device::cpu());
    devices
}
