//! The plain devices that the tests run on.

#[path = "wgpu.rs"]
mod wgpu;

use burn::tensor::Device;
use wgpu::wgpu;

/// Flex, and wgpu's default adapter where its feature is on and there is one.
pub(crate) fn devices() -> Vec<Device> {
    [Device::flex()].into_iter().chain(wgpu()).collect()
}
