//! f32 or mixed precision.

use burn::tensor::Device;
use burn_amp::{Autocast, Policy};
use std::fmt;

/// How a program is run.
#[derive(Clone, Copy, Debug)]
pub enum Precision {
    /// In f32 on the plain device.
    Plain,
    /// In f32 on the autocast device.
    O0,
    /// In bf16 on the autocast device.
    Bf16,
}

impl Precision {
    /// `device`, as the program is to see it.
    pub fn device(self, device: Device) -> Device {
        let policy = match self {
            Self::Plain => return device,
            Self::O0 => Policy::o0(),
            Self::Bf16 => Policy::bf16(),
        };
        let device = Autocast::new(policy).device(device);
        device.expect("the device computes in bf16")
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Plain => "plain f32",
            Self::O0 => "autocast O0",
            Self::Bf16 => "autocast bf16",
        })
    }
}
