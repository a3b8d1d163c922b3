//! Joins or starts the ranks of a run.

use std::time::Duration;

use burn_ddp::launch::{LaunchOptions, spawn_self};
use burn_ddp::{DdpError, ProcessGroup, is_distributed_env};

use crate::cli::Args;
use crate::error::Error;

/// How long the other ranks may take to report errors after one has failed.
const GRACE: Duration = Duration::from_secs(2);

/// The role of this process.
pub(crate) enum Role {
    /// It starts the ranks, and waits for them.
    Launcher,
    /// It is one of the ranks.
    Rank(ProcessGroup),
}

impl Role {
    /// A rank, if torchrun, mpirun, Slurm or our own launcher started this process, or if there is only one rank. Otherwise the
    /// launcher.
    pub(crate) fn of(args: &Args) -> Result<Self, Error> {
        if is_distributed_env() {
            let timeout = Duration::from_secs(args.timeout as u64);
            return Ok(Self::Rank(ProcessGroup::builder().timeout(timeout).init()?));
        }
        match args.ranks {
            1 => Ok(Self::Rank(ProcessGroup::single())),
            _ => Ok(Self::Launcher),
        }
    }
}

/// Starts the ranks, as processes of this program with this process's arguments, and waits for them.
pub(crate) fn launch(args: &Args) -> Result<(), Error> {
    let mut options = LaunchOptions::new().grace(GRACE);
    if let Some(port) = args.port {
        options = options.master("127.0.0.1", port);
    }
    spawn_self(args.ranks, options).map_err(|error| match error {
        // The rank has already printed its error.
        DdpError::RankFailed {
            code: Some(code), ..
        } => Error::Said(code as u8),
        error => error.into(),
    })
}
