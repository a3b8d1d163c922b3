//! The device a rank computes on, and the number format of its ops.

#[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]
use burn::backend::Cube;
#[cfg(feature = "flex")]
use burn::backend::Flex;
use burn::tensor::{DType, Device};
use burn_amp::{Autocast, AutocastDevice};
use burn_ddp::{DdpConfig, Overlap, ProcessGroup};
use burn_layer::Layers;
use examples::text::thousands;

use crate::cli::{Args, DeviceKind, Precision};
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

/// A device to train on in some precision.
pub(crate) struct Compute {
    /// With autodiff.
    pub(crate) device: Device,
    autocast: Option<AutocastDevice>,
    /// Where gradients can be averaged during backward: on a layered device, unless they are to be accumulated first.
    pub(crate) overlap: Option<Overlap>,
}

impl Compute {
    /// Puts autocast over `device`, unless all is to run in f32.
    pub(crate) fn new(device: Device, args: &Args, group: &ProcessGroup) -> Result<Self, Error> {
        let autocast = match args.precision {
            Precision::F32 => None,
            Precision::Bf16 | Precision::Fp8 => Some(Autocast::bf16()),
            Precision::Fp16 => Some(Autocast::fp16()),
        };
        let Some(autocast) = autocast else {
            return Ok(Self {
                device: device.autodiff(),
                autocast: None,
                overlap: None,
            });
        };
        let layer = autocast.layer(&device)?;
        let mut layers = Layers::on(device).layer(layer.clone());
        let overlap = match args.accumulate {
            1 if group.world_size() > 1 => Some(Overlap::new(group, DdpConfig::new())?),
            _ => None,
        };
        if let Some(overlap) = &overlap {
            layers = layers.layer(overlap.layer());
        }
        let device = with_fp8_ops(burn_ddp::with_custom_ops(layers)).serve()?;
        Ok(Self {
            device: device.clone().autodiff(),
            autocast: Some(layer.on(device)),
            overlap,
        })
    }

    /// How many ops ran in which number format.
    pub(crate) fn ops(&self) -> String {
        let Some(autocast) = &self.autocast else {
            return "all in f32".to_owned();
        };
        let report = autocast.report();
        let formats = [
            ("bf16", DType::BF16),
            ("fp16", DType::F16),
            ("f32", DType::F32),
        ];
        let counts = formats.map(|(name, dtype)| (name, report.runs(dtype)));
        let counts: Vec<String> = counts
            .iter()
            .filter(|(_, runs)| *runs > 0)
            .map(|(name, runs)| format!("{} in {name}", thousands(*runs)))
            .collect();
        counts.join(", ")
    }
}

/// Lets the device run `Fp8Linear`.
fn with_fp8_ops(layers: Layers) -> Layers {
    #[cfg(feature = "flex")]
    let layers = layers.custom_ops::<Flex>(burn_fp8::custom_ops::<Flex>());
    #[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]
    let layers = layers.custom_ops::<Cube>(burn_fp8::custom_ops::<Cube>());
    layers
}
