//! The plain devices that the tests run on.

#[path = "../../../burn-layer/tests/suite/cube.rs"]
mod cube;

use burn::tensor::Device;
pub(crate) use cube::{cube_devices, cuda, wgpu};

/// Flex, wgpu and CUDA. Not CubeCL's CPU runtime, which compiles kernels for long.
pub(crate) fn devices() -> Vec<Device> {
    let gpus = wgpu().into_iter().chain(cuda());
    [Device::flex()].into_iter().chain(gpus).collect()
}
