//! The plain devices that the tests run on.

#[path = "../../../burn-layer/tests/suite/cube.rs"]
mod cube;

use burn::tensor::Device;
pub(crate) use cube::{cube_devices, wgpu};

/// Flex and wgpu. Not CubeCL's CPU runtime, which compiles kernels for long.
pub(crate) fn devices() -> Vec<Device> {
    [Device::flex()].into_iter().chain(wgpu()).collect()
}
