//! Starts the ranks of a data parallel job: `burn-ddp run -n 4 -- PROGRAM ARGS`.

use std::{ffi::OsString, process::ExitCode, time::Duration};

use burn_ddp::{
    DdpError,
    launch::{self, LaunchOptions},
};
use clap::{Args, Parser, Subcommand};

/// Data parallel training for Burn.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Start a program as several ranks, and wait for all of them.
    Run(Run),
}

#[derive(Args)]
struct Run {
    /// Ranks to start on this machine.
    #[arg(short, default_value_t = 1)]
    n: usize,
    /// Machines that take part; each runs this command.
    #[arg(long, default_value_t = 1)]
    nnodes: usize,
    /// This machine's number among them, from 0.
    #[arg(long, default_value_t = 0)]
    node_rank: usize,
    /// HOST:PORT where rank 0 listens. Needed on several machines.
    #[arg(long)]
    master: Option<String>,
    /// Seconds that the other ranks may go on when one has failed.
    #[arg(long, default_value_t = 5.0)]
    grace: f64,
    /// How often to start all ranks again when one has failed. They find RESTART_COUNT in the
    /// environment.
    #[arg(long, default_value_t = 0)]
    max_restarts: usize,
    /// Do not put the rank before each line of output.
    #[arg(long)]
    no_prefix: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

fn run(run: Run) -> Result<(), DdpError> {
    if run.node_rank >= run.nnodes {
        return Err(DdpError::InvalidArgument(format!(
            "--node-rank {}; expected less than --nnodes, {}",
            run.node_rank, run.nnodes
        )));
    }
    let (program, arguments) = run.command.split_first().expect("clap requires one");
    let grace = Duration::try_from_secs_f64(run.grace)
        .map_err(|error| DdpError::InvalidArgument(format!("--grace: {error}")))?;
    let mut options = LaunchOptions::new()
        .arguments(arguments)
        .nodes(run.nnodes, run.node_rank)
        .prefix_output(!run.no_prefix)
        .grace(grace)
        .max_restarts(run.max_restarts);
    if let Some(master) = &run.master {
        let parts = master.rsplit_once(':');
        let parts = parts.and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let (host, port) = parts.ok_or_else(|| {
            DdpError::InvalidArgument(format!("--master {master}; expected HOST:PORT"))
        })?;
        options = options.master(host, port);
    }
    launch::spawn(program, run.n, options)
}

fn main() -> ExitCode {
    let Action::Run(arguments) = Cli::parse().command;
    let Err(error) = run(arguments) else {
        return ExitCode::SUCCESS;
    };
    eprintln!("burn-ddp: {error}");
    match error {
        DdpError::RankFailed { code, .. } => {
            let code = code.and_then(|code| u8::try_from(code).ok());
            ExitCode::from(code.unwrap_or(1))
        }
        _ => ExitCode::from(2),
    }
}
