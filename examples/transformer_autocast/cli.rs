//! The command line.

use std::fmt;

use clap::{Parser, ValueEnum, value_parser};
use examples::device::DeviceKind;
use examples::text::rate;

/// Train a small vision transformer in f32, bf16, fp16 and fp8, and compare the results.
///
/// For each seed, all precisions start from the same weights and train on the same batches of the
/// bundled digits.
#[derive(Debug, Clone, Parser)]
#[command(name = "transformer_autocast", version, max_term_width = 100)]
pub(crate) struct Args {
    /// Number formats of matmuls and convolutions [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    precision: Vec<Precision>,
    /// Number of trainings of each precision, each with its own initial weights and batches
    #[arg(long, value_name = "N", default_value = "3", value_parser = positive())]
    pub(crate) seeds: usize,
    /// Passes over the training images
    #[arg(long, value_name = "N", default_value = "16", value_parser = positive())]
    pub(crate) epochs: usize,
    /// Images in a batch
    #[arg(long, value_name = "N", default_value = "64", value_parser = value_parser!(u16).range(1..=1442))]
    pub(crate) batch_size: u16,
    /// Peak learning rate of Adam
    #[arg(long, value_name = "RATE", default_value = "0.004", value_parser = rate)]
    pub(crate) lr: f64,
    /// Number of transformer layers
    #[arg(long, value_name = "N", default_value = "2", value_parser = positive())]
    pub(crate) layers: usize,
    /// Size of the embedding of a patch, a multiple of 4 (the number of heads)
    #[arg(long, value_name = "N", default_value = "32", value_parser = width)]
    pub(crate) width: usize,
    /// Where to train; all but flex need the feature of that name
    #[arg(long, value_enum, default_value_t = DeviceKind::Flex)]
    pub(crate) device: DeviceKind,
    /// Stop after N steps, even if the schedule is longer
    #[arg(long, value_name = "N", value_parser = positive())]
    pub(crate) max_steps: Option<usize>,
    /// Print only the final table
    #[arg(long)]
    pub(crate) quiet: bool,
}

/// The number format of matmuls and convolutions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Precision {
    /// The plain device.
    F32,
    /// Autocast to bf16.
    Bf16,
    /// Autocast to fp16, with loss scaling.
    Fp16,
    /// Linear layers in fp8, scaled by their current amaxes, the rest in bf16.
    Fp8,
    /// Like fp8, with delayed scaling.
    Fp8Delayed,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8 => "fp8",
            Self::Fp8Delayed => "fp8-delayed",
        })
    }
}

impl Args {
    /// The precisions to train in.
    pub(crate) fn precisions(&self) -> Vec<Precision> {
        if self.precision.is_empty() {
            Precision::value_variants().to_vec()
        } else {
            self.precision.clone()
        }
    }
}

fn positive() -> impl clap::builder::TypedValueParser<Value = usize> {
    use clap::builder::TypedValueParser;
    value_parser!(u32).range(1..).map(|number| number as usize)
}

fn width(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(width) if width > 0 && width % 4 == 0 => Ok(width),
        _ => Err("expected 4, 8, 12, ...".to_owned()),
    }
}
