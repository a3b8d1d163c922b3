//! The device to compute on, as the command line names it.

use std::fmt;

use burn::tensor::Device;
#[cfg(feature = "cuda")]
use burn::tensor::DeviceType;
use burn_ddp::ProcessGroup;
use clap::ValueEnum;
use thiserror::Error;

/// Where to compute.
///
/// ```
/// use burn::tensor::Device;
/// use burn_ddp::ProcessGroup;
/// use examples::device::DeviceKind;
///
/// assert_eq!(DeviceKind::Flex.open(&ProcessGroup::single())?, Device::flex());
/// # Ok::<(), examples::device::DeviceError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// Burn's CPU backend.
    Flex,
    /// NVIDIA's GPUs.
    Cuda,
    /// GPUs by Vulkan, Metal or DirectX.
    Wgpu,
    /// CubeCL's kernels on the CPU.
    Cpu,
}

/// Why there is no such device.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The program was built without it.
    #[error(
        "device `{0}` is not compiled in: run `cargo run --release` with `--features {0},fusion`"
    )]
    NotCompiledIn(DeviceKind),
    /// The machine has none.
    #[error(
        "this machine has no device for `{0}`: is its driver installed? `--device flex` needs none"
    )]
    NoDevice(DeviceKind),
}

impl DeviceKind {
    /// The device of a rank. With CUDA it is the rank's own, see [`ProcessGroup::local_device`].
    ///
    /// # Errors
    /// If the device is not compiled in, or the machine has none.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn open(self, group: &ProcessGroup) -> Result<Device, DeviceError> {
        match self {
            #[cfg(feature = "flex")]
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "cuda")]
            Self::Cuda => {
                let own = group.local_device(DeviceType::Cuda);
                own.map_err(|_| DeviceError::NoDevice(self))
            }
            #[cfg(feature = "wgpu")]
            Self::Wgpu => match Device::enumerate(burn::tensor::DeviceType::Wgpu).is_empty() {
                true => Err(DeviceError::NoDevice(self)),
                false => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
            },
            #[cfg(feature = "cpu")]
            Self::Cpu => Ok(Device::cpu()),
            #[allow(unreachable_patterns, reason = "every device may be compiled in")]
            kind => Err(DeviceError::NotCompiledIn(kind)),
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("no device is hidden");
        f.write_str(value.get_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_says_what_to_do() {
        let group = ProcessGroup::single();
        for kind in DeviceKind::value_variants() {
            let Err(error) = kind.open(&group) else {
                continue;
            };
            let text = error.to_string();
            assert!(text.contains(&format!("`{kind}`")), "{text}");
            assert!(
                text.contains("--features") || text.contains("--device"),
                "{text}"
            );
        }
        #[cfg(not(feature = "cuda"))]
        assert!(matches!(
            DeviceKind::Cuda.open(&group),
            Err(DeviceError::NotCompiledIn(DeviceKind::Cuda))
        ));
    }
}
