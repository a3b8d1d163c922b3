//! Trains the CIFAR ResNet of He et al. 2015 on several ranks in mixed precision.
//!
//! ```text
//! cargo run --release --example cifar_resnet_ddp
//! cargo run --release --example cifar_resnet_ddp -- --help
//! ```
//!
//! Without arguments the program starts two processes of itself, which average their gradients over TCP, and trains
//! in bf16 on the bundled images of real digits. The training loop is in `train.rs`, and a single step in `trainer.rs`.

mod checkpoint;
mod cli;
mod device;
mod error;
mod evaluate;
mod feed;
mod log;
mod ranks;
mod report;
mod setup;
mod train;
mod trainer;

use std::process::ExitCode;

use burn_ddp::ProcessGroup;

use crate::cli::Args;
use crate::error::Error;
use crate::ranks::Role;
use crate::setup::Setup;

fn main() -> ExitCode {
    match run(&cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error.say();
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(args: &Args) -> Result<(), Error> {
    match Role::of(args)? {
        Role::Launcher => {
            // Errors in the arguments are reported once, before any rank starts. Only the number format is checked by
            // the ranks: asking a GPU about it here would hold memory of the GPU for as long as they run.
            Setup::new(args, args.ranks, &ProcessGroup::single())?;
            ranks::launch(args)
        }
        Role::Rank(group) => {
            let setup = Setup::new(args, group.world_size(), &group)?;
            let outcome = train::train(args, setup, &group).map_err(|error| error.on(&group))?;
            report::finish(args, &outcome)
        }
    }
}
