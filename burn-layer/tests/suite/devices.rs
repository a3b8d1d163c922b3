//! The plain devices that the tests run on.

use burn::tensor::Device;

/// Flex, and wgpu's default adapter where its feature is on and there is one.
pub(crate) fn devices() -> Vec<Device> {
    [Device::flex()].into_iter().chain(wgpu()).collect()
}

fn wgpu() -> Option<Device> {
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
