//! The command line.

use std::fmt;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{ArgAction, Parser, ValueEnum};
use examples::device::DeviceKind;
use examples::resnet::ResNetConfig;
use examples::text::rate;
use serde::{Deserialize, Serialize};

const ABOUT: &str = "\
Train the CIFAR ResNet of He et al. 2015 on several ranks in mixed precision.

Default: two ranks on this machine, bf16, and the bundled digits (optdigits in the CIFAR-10 layout).
Under torchrun, mpirun or Slurm, the program joins the ranks that they started.";

/// The command line.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "cifar_resnet_ddp",
    version,
    about = ABOUT,
    max_term_width = 100,
    disable_help_flag = true
)]
pub(crate) struct Args {
    /// Folder with the binary version of CIFAR-10 (data_batch_1.bin, ...) [default: the bundled digits]
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    pub(crate) data: Option<PathBuf>,
    /// Images in a batch of one rank
    #[arg(long, value_name = "N", default_value = "16", value_parser = positive, help_heading = "Data")]
    pub(crate) batch_size: usize,

    /// Number of layers: 8, 14, 20, 26, 32, ... (6n + 2)
    #[arg(long, value_name = "N", default_value = "20", value_parser = depth, help_heading = "Model")]
    pub(crate) depth: usize,
    /// Channels of the first stage (16 in the paper)
    #[arg(long, value_name = "N", default_value = "8", value_parser = positive, help_heading = "Model")]
    pub(crate) width: usize,
    /// Normalize the batch of each rank separately
    #[arg(long, help_heading = "Model")]
    pub(crate) no_sync_bn: bool,

    /// Passes over the training images
    #[arg(long, value_name = "N", default_value = "10", value_parser = positive, help_heading = "Training")]
    pub(crate) epochs: usize,
    /// Peak learning rate, for the combined batch of all ranks
    #[arg(long, value_name = "RATE", default_value = "0.05", value_parser = rate, help_heading = "Training")]
    pub(crate) lr: f64,
    /// Epochs of linear warm-up before the cosine schedule
    #[arg(long, value_name = "N", default_value = "2", help_heading = "Training")]
    pub(crate) warmup_epochs: usize,
    /// Weight decay for the weights of the convolutions and the linear layer
    #[arg(long, value_name = "RATE", default_value = "0.0005", value_parser = rate, help_heading = "Training")]
    pub(crate) weight_decay: f64,
    /// Batches to accumulate gradients over for each step
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive, help_heading = "Training")]
    pub(crate) accumulate: usize,
    /// Seed for the initial weights, the order of the images and their crops
    #[arg(long, value_name = "N", default_value = "0", help_heading = "Training")]
    pub(crate) seed: u64,
    /// Stop after N steps, even if the schedule is longer
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Training")]
    pub(crate) max_steps: Option<usize>,

    /// Number format of matmuls and convolutions (fp8: only the last layer; bf16 elsewhere)
    #[arg(long, value_enum, default_value_t = Precision::Bf16, help_heading = "Hardware")]
    pub(crate) precision: Precision,
    /// Device to train on; cuda, wgpu and cpu need the cargo feature of that name
    #[arg(long, value_enum, default_value_t = DeviceKind::Flex, help_heading = "Hardware")]
    pub(crate) device: DeviceKind,
    /// Number of ranks to start on this machine
    #[arg(long, value_name = "N", default_value = "2", value_parser = positive, help_heading = "Hardware")]
    pub(crate) ranks: usize,
    /// Port where the ranks meet [default: a free port]
    #[arg(long, value_name = "PORT", help_heading = "Hardware")]
    pub(crate) port: Option<u16>,
    /// Seconds to wait for another rank before giving up
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = positive, help_heading = "Hardware")]
    pub(crate) timeout: usize,

    /// Folder for metrics.csv and curves.png
    #[arg(
        long,
        value_name = "DIR",
        default_value = "target/cifar_resnet_ddp",
        help_heading = "Output"
    )]
    pub(crate) out: PathBuf,
    /// Folder where rank 0 keeps the last two checkpoints and the best one [default: OUT/checkpoints]
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) checkpoint_dir: Option<PathBuf>,
    /// Steps between checkpoints, besides those at the end of each epoch
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Output")]
    pub(crate) checkpoint_every: Option<usize>,
    /// Resume from the last checkpoint
    #[arg(long, help_heading = "Output")]
    pub(crate) resume: bool,
    /// Print only the final table
    #[arg(long, help_heading = "Output")]
    pub(crate) quiet: bool,

    /// Print this help
    #[arg(long, short, action = ArgAction::HelpShort)]
    help: Option<bool>,
}

/// The number format of matmuls and convolutions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Precision {
    F32,
    Bf16,
    Fp16,
    Fp8,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let value = self.to_possible_value().expect("no value is skipped");
        f.write_str(value.get_name())
    }
}

impl Args {
    /// The folder where rank 0 keeps the checkpoints.
    pub(crate) fn checkpoint_dir(&self) -> PathBuf {
        self.checkpoint_dir
            .clone()
            .unwrap_or_else(|| self.out.join("checkpoints"))
    }

    /// The requested network.
    pub(crate) fn network(&self) -> ResNetConfig {
        ResNetConfig::new(self.depth, self.width)
    }
}

/// Parses the arguments of this process. An invalid one ends the process with one line and exit code 2.
pub(crate) fn parse() -> Args {
    Args::try_parse().unwrap_or_else(|error| {
        if matches!(
            error.kind(),
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
        ) {
            error.exit();
        }
        eprintln!("{}", one_line(&error.to_string()));
        std::process::exit(2);
    })
}

/// Clap's error message in one line, without the hints below it.
fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim);
    let hints = ["tip:", "Usage:", "For more information"];
    let lines = lines.take_while(|line| !hints.iter().any(|hint| line.starts_with(hint)));
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    format!("{} (see --help)", lines.join(" "))
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("expected 1 or more".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("expected a whole number".to_owned()),
    }
}

fn depth(text: &str) -> Result<usize, String> {
    let depth = text
        .parse()
        .ok()
        .filter(|&depth| ResNetConfig::new(depth, 1).blocks_per_stage().is_some());
    depth.ok_or_else(|| "expected 8, 14, 20, 26, 32, ... (6n + 2)".to_owned())
}
