//! CubeCL's devices, for the tests of the crates above.

#[cfg(feature = "cpu")]
#[path = "cpu.rs"]
mod cpu;
#[path = "cuda.rs"]
mod cuda;
#[path = "wgpu.rs"]
mod wgpu;

use burn::tensor::Device;
#[allow(unused_imports)]
pub(crate) use cuda::cuda;
pub(crate) use wgpu::wgpu;

/// Its CPU runtime where the feature is on, wgpu and CUDA.
pub(crate) fn cube_devices() -> Vec<Device> {
    #[allow(unused_mut)]
    let mut devices: Vec<Device> = wgpu().into_iter().chain(cuda()).collect();
    #[cfg(feature = "cpu")]
    devices.push(cpu::cpu());
    devices
}
