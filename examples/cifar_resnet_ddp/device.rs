//! The device a rank computes on.

use burn::tensor::Device;

use crate::cli::DeviceKind;
use crate::error::Error;

/// The plain Burn device asked for; rank `local_rank` of this machine takes the GPU of that number.
pub(crate) fn plain(kind: DeviceKind, local_rank: usize) -> Result<Device, Error> {
    // Unused where no GPU backend is compiled in.
    let _ = local_rank;
    match kind {
        #[cfg(feature = "flex")]
        DeviceKind::Flex => Ok(Device::flex()),
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => Ok(Device::cuda(local_rank)),
        #[cfg(feature = "wgpu")]
        DeviceKind::Wgpu => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
        #[cfg(feature = "cpu")]
        DeviceKind::Cpu => Ok(Device::cpu()),
        #[allow(unreachable_patterns, reason = "every device may be compiled in")]
        kind => Err(Error::NotCompiledIn(kind)),
    }
}
