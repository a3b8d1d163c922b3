//! The device on which a rank computes, and the number format of its ops.

use burn::tensor::{DType, Device};
use burn_amp::{Autocast, AutocastDevice, with_fp8_ops};
use burn_ddp::{Ddp, DdpConfig, Overlap, ProcessGroup};
use burn_layer::Layers;
use examples::resnet::ResNet;
use examples::text::thousands;

use crate::cli::{Args, Precision};
use crate::error::Error;

/// A device to train on.
pub(crate) struct Compute {
    /// The device with autodiff.
    pub(crate) device: Device,
    autocast: Option<AutocastDevice>,
    /// `Some` if the device averages gradients while backward runs.
    overlap: Option<Overlap>,
    precision: Precision,
}

impl Compute {
    /// For f32, `device` itself. For the other formats, `device` with autocast, and with a layer that averages
    /// gradients while backward still runs.
    pub(crate) fn new(args: &Args, device: Device, group: &ProcessGroup) -> Result<Self, Error> {
        let autocast = match args.precision {
            Precision::F32 => {
                return Ok(Self {
                    device: device.autodiff(),
                    autocast: None,
                    overlap: None,
                    precision: args.precision,
                });
            }
            Precision::Bf16 | Precision::Fp8 => Autocast::bf16(),
            Precision::Fp16 => Autocast::fp16(),
        };
        let autocast = autocast.layer(&device)?;
        let layers = with_fp8_ops(Layers::on(device).layer(autocast.clone()));
        let overlap = Overlap::new(group, DdpConfig::new())?;
        let device = overlap.serve(layers)?;
        Ok(Self {
            device: device.clone().autodiff(),
            autocast: Some(autocast.on(device)),
            overlap: Some(overlap),
            precision: args.precision,
        })
    }

    /// The DDP that keeps the replicas of `model` equal.
    pub(crate) fn ddp(&mut self, group: &ProcessGroup, model: &ResNet) -> Result<Ddp, Error> {
        Ok(match self.overlap.take() {
            Some(overlap) => Ddp::overlapped(group, overlap, model)?,
            None => Ddp::new(group, DdpConfig::new(), model)?,
        })
    }

    /// The numbers of ops that ran in each number format.
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
        let head = match self.precision {
            Precision::Fp8 => "; the products of the last layer in fp8",
            _ => "",
        };
        counts.join(", ") + head
    }
}
