//! Trains the CIFAR ResNet of He et al. 2015 on several ranks in mixed precision.
//!
//! ```text
//! cargo run --release --example cifar_resnet_ddp
//! cargo run --release --example cifar_resnet_ddp -- --help
//! ```
//!
//! Without arguments the program starts two processes of itself, which average their gradients over TCP, and trains
//! in bf16 on the real digits that come with it. The loop is in `train.rs`, what a step does in `trainer.rs`.

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
            // Whatever is wrong with the arguments is said once, before any rank starts. Only a number format
            // that the device lacks is left to them: asking a GPU would take memory from it for as long as they run.
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
