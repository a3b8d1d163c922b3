//! Trains a small vision transformer in f32, bf16, fp16 and fp8, from the same weights on the same
//! batches, and compares the results.
//!
//! ```text
//! cargo run --release --example transformer_autocast
//! cargo run --release --example transformer_autocast -- --help
//! ```
//!
//! The model is unmodified Burn code. The device determines the precision. fp16 has a loss scaler
//! around the optimizer.

mod cli;
mod report;
mod train;

use std::process::ExitCode;

use clap::Parser;
use examples::digits;
use examples::progress::Progress;

use crate::cli::Args;
use crate::report::Report;
use crate::train::{Error, Training};

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Error> {
    let data = digits::bundled();
    let training = Training::new(args, &data);
    let runs = args.precisions().len() * args.seeds;
    let mut progress = if args.quiet {
        Progress::quiet()
    } else {
        Progress::new(runs * training.steps(), 0)
    };
    let mut report = Report::new(args.seeds);
    for precision in args.precisions() {
        for seed in 0..args.seeds as u64 {
            let outcome = training.run(precision, seed, report.len(), &mut progress)?;
            progress.line(&format!("{precision}, seed {seed}: {outcome}"));
            report.add(precision, outcome);
        }
    }
    progress.finish();
    print!("{report}");
    Ok(())
}
