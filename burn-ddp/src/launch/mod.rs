//! Starts the ranks of a job as processes on this machine.
//!
//! A program can start itself once for each rank:
//!
//! ```no_run
//! use burn_ddp::{DdpError, launch::{self, LaunchOptions}};
//!
//! fn main() -> Result<(), DdpError> {
//!     launch::run(2, LaunchOptions::new(), |group| {
//!         println!("rank {} of {}", group.rank(), group.world_size());
//!         group.barrier()
//!     })
//! }
//! ```
//!
//! The ranks of one machine find each other through a file in a temporary folder, so that no port has to be
//! chosen in advance. A random secret keeps other processes out.

mod blame;
mod failures;
mod nproc;
mod output;
mod parent;
mod processes;
mod signals;
mod stops;

use std::{
    env,
    ffi::{OsStr, OsString},
    process::Command,
    thread,
    time::Duration,
};

pub use self::nproc::nproc;
pub(crate) use self::{
    blame::{blame, note_meeting},
    parent::die_with,
};
use self::{output::say, processes::Processes, signals::Signals};
use crate::{DdpError, ProcessGroup, environment, is_distributed_env};

/// How to start the ranks.
#[derive(Clone, Debug)]
#[must_use]
pub struct LaunchOptions {
    arguments: Option<Vec<OsString>>,
    variables: Vec<(OsString, OsString)>,
    master: Option<(String, u16)>,
    nodes: usize,
    node_rank: usize,
    prefix: bool,
    grace: Duration,
    stop_grace: Duration,
    max_restarts: usize,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LaunchOptions {
    /// The defaults: one machine, no prefix before output, no restarts.
    pub fn new() -> Self {
        Self {
            arguments: None,
            variables: Vec::new(),
            master: None,
            nodes: 1,
            node_rank: 0,
            prefix: false,
            grace: Duration::from_secs(5),
            stop_grace: Duration::from_secs(30),
            max_restarts: 0,
        }
    }

    /// The program's arguments. Default: none, or with [`spawn_self`] those that this process was started with.
    pub fn arguments<S: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.arguments = Some(arguments.into_iter().map(Into::into).collect());
        self
    }

    /// Sets an environment variable for all ranks.
    pub fn variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// The host and port where rank 0 listens (MASTER_ADDR, MASTER_PORT). Default: rank 0 chooses a port. Required on
    /// several machines.
    pub fn master(mut self, host: impl Into<String>, port: u16) -> Self {
        self.master = Some((host.into(), port));
        self
    }

    /// The number of machines and this machine's number among them. Each machine starts the same number of ranks.
    /// All must have the same `BURN_DDP_SECRET` in the environment, or none: a random secret is only generated for
    /// a single machine.
    ///
    /// # Panics
    ///
    /// Panics if `node_rank` is not below `nodes`.
    pub fn nodes(mut self, nodes: usize, node_rank: usize) -> Self {
        assert!(node_rank < nodes, "the node rank must be below {nodes}");
        self.nodes = nodes;
        self.node_rank = node_rank;
        self
    }

    /// Whether to put the rank's number before each line of output.
    ///
    /// Even without the prefix, the ranks' stdout is piped through this process if it would be a terminal: the system
    /// would stop a program that takes over its terminal, as burn-train's dashboard does. With the pipe, burn-train
    /// prints its progress instead.
    pub fn prefix_output(mut self, prefix: bool) -> Self {
        self.prefix = prefix;
        self
    }

    /// How long the other ranks may continue after one has failed, to report their own errors, and also
    /// how long they then have between SIGTERM and SIGKILL. Default: 5 seconds.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// How long the ranks have to end, for example to save a checkpoint, after this process has forwarded a signal that
    /// asks them to. Then they are killed. Default: 30 seconds, as in Kubernetes, torchrun and Slurm.
    ///
    /// A cluster's limit for this process counts from the same moment: this one should not be longer.
    pub fn stop_grace(mut self, grace: Duration) -> Self {
        self.stop_grace = grace;
        self
    }

    /// How often to restart all ranks after one has failed, as torchrun does. All have ended before the restart.
    /// The new ranks find `RESTART_COUNT` (0 at first) in the environment, and resume from their last
    /// [checkpoint](crate::Checkpoints). Default: 0.
    ///
    /// On several machines, each launcher counts its own restarts, and the new ranks wait for one another at the master, as
    /// the first ones did. Give them time by the same [`grace`](Self::grace) on all machines. If ranks do not appear
    /// within the [time limit](crate::GroupBuilder::connect_timeout), the launcher of their machine may have been asked to end,
    /// and there are no more restarts.
    pub fn max_restarts(mut self, restarts: usize) -> Self {
        self.max_restarts = restarts;
        self
    }
}

/// Runs `body` on `ranks` ranks, each of which is a process of this program. This is the counterpart of PyTorch's
/// `torch.multiprocessing.spawn`, for programs that start their own ranks.
///
/// A process that was started as a rank, by this function or by any launcher, joins its group and runs
/// `body`. Any other process starts the ranks and waits for them to end. Because a closure cannot be sent to another
/// process, each rank runs the program from its beginning: make this call first in `main`,
/// and read arguments from the command line.
///
/// ```
/// use burn_ddp::{DdpError, ReduceOp, launch::{self, LaunchOptions}};
///
/// fn main() -> Result<(), DdpError> {
///     launch::run(2, LaunchOptions::new(), |group| {
///         let mut ranks = [1.0f32];
///         group.all_reduce(&mut ranks, ReduceOp::Sum)?;
///         assert_eq!(ranks, [2.0]);
///         Ok(())
///     })
/// }
/// ```
///
/// # Errors
///
/// On a rank, the errors of [`ProcessGroup::init`] and of `body`; in the process that starts the ranks, the errors of
/// [`spawn`].
pub fn run<E: From<DdpError>>(
    ranks: usize,
    options: LaunchOptions,
    body: impl FnOnce(ProcessGroup) -> Result<(), E>,
) -> Result<(), E> {
    match is_distributed_env() {
        true => body(ProcessGroup::init()?),
        false => Ok(spawn_self(ranks, options)?),
    }
}

/// Starts this program `ranks` times and waits for all to end. See [`spawn`], and [`run`], which also runs the code of
/// the ranks.
///
/// # Errors
///
/// Those of [`spawn`].
pub fn spawn_self(ranks: usize, options: LaunchOptions) -> Result<(), DdpError> {
    let program =
        env::current_exe().map_err(|error| DdpError::io("finding this program", error))?;
    let options = match options.arguments {
        Some(_) => options,
        None => options.arguments(env::args_os().skip(1)),
    };
    spawn(program, ranks, options)
}

/// Starts a program `ranks` times and waits for all to end. The environment of each rank has RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, MASTER_ADDR, (with [`LaunchOptions::master`]) MASTER_PORT, RESTART_COUNT, and the variables of our own
/// rendezvous. Unless RAYON_NUM_THREADS is set, the ranks share the machine's cores evenly.
///
/// Each rank leads a process group of its own, so that the processes that a script starts end with it, and a Ctrl-C at
/// the terminal reaches this process alone. This process forwards to the groups of all ranks the signals that ask it to
/// end (SIGINT, SIGTERM, SIGQUIT, and SIGHUP unless that is ignored, as under nohup), and SIGUSR1 and SIGUSR2,
/// by which Slurm can announce that the time is nearly over. Before it returns, it restores the previous signal handlers.
/// When a rank fails, the others are ended, and all are restarted if [`max_restarts`](LaunchOptions::max_restarts) allows it.
/// Processes that the ranks leave running are ended after the same [grace](LaunchOptions::grace). The ranks end with this
/// process, however it ends ([`ProcessGroup::init`] ensures it).
///
/// Ranks that are asked to end have [30 seconds](LaunchOptions::stop_grace) for it, and are killed after that. A second
/// Ctrl-C (or SIGTERM, or another signal that asks to end), at least a fifth of a second after the first, kills them at once.
///
/// Ctrl-Z (SIGTSTP) stops the ranks together with this process, and they go on with it. Their time limits count the pause: if a
/// call is under way in one that is longer than its limit, the job ends with [`DdpError::Timeout`].
///
/// Ranks have no terminal: they get no input from one, and a rank that tries to set it up (by /dev/tty) is stopped by the
/// system. When a signal stops a rank, a message on stderr says so once (on Linux).
///
/// # Errors
///
/// [`DdpError::RankFailed`] with the rank that failed first, in the last attempt, or [`DdpError::Io`] when a process could
/// not be started. A rank that failed because of another rank of this machine counts as failing after it.
pub fn spawn(
    program: impl AsRef<OsStr>,
    ranks: usize,
    options: LaunchOptions,
) -> Result<(), DdpError> {
    if ranks == 0 {
        return Err(DdpError::InvalidArgument(
            "0 ranks; expected at least 1".into(),
        ));
    }
    if options.nodes > 1 && options.master.is_none() {
        return Err(DdpError::InvalidArgument(
            "several machines need the host and port where rank 0 listens: `--master HOST:PORT`, or \
             `LaunchOptions::master`"
                .into(),
        ));
    }
    // Registered before the first process starts, so that no signal is lost.
    let mut signals =
        Signals::watch().map_err(|error| DdpError::io("watching for signals", error))?;
    let mut restarts = 0;
    loop {
        let mut processes = start(program.as_ref(), ranks, &options, restarts)?;
        let mut result = processes.supervise(&mut signals, options.grace, options.stop_grace);
        let Err(DdpError::RankFailed { rank, status, .. }) = &mut result else {
            return result;
        };
        if processes.interrupted() || restarts == options.max_restarts {
            return result;
        }
        // Another machine's launcher that was asked to end does not start its ranks again: to wait once is enough.
        if options.nodes > 1 && processes.waited_in_vain(*rank) {
            status.push_str(
                "; ranks did not appear in time, and the launcher of another machine may have ended, so this one does not try again",
            );
            return result;
        }
        restarts += 1;
        if let Err(error) = result {
            let most = options.max_restarts;
            say(&format!(
                "{error}; starting all ranks again ({restarts} of {most})"
            ));
        }
    }
}

/// Starts all ranks.
fn start(
    program: &OsStr,
    ranks: usize,
    options: &LaunchOptions,
    restarts: usize,
) -> Result<Processes, DdpError> {
    let folder = tempfile::tempdir()
        .map_err(|error| DdpError::io("making a folder for the rendezvous", error))?;
    let rendezvous = format!("file://{}", folder.path().join("master").display());
    let blame = folder.path().to_owned();
    let secret = format!("{:032x}", rand::random::<u128>());
    let mut processes = Processes::new(folder);
    for local_rank in 0..ranks {
        let rank = options.node_rank * ranks + local_rank;
        let mut command = Command::new(program);
        command
            .args(options.arguments.iter().flatten())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", (ranks * options.nodes).to_string())
            .env("LOCAL_RANK", local_rank.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env(environment::RESTARTS, restarts.to_string())
            .env(environment::PARENT, std::process::id().to_string())
            .env(environment::PARENT_NAMESPACE, parent::namespace())
            .env(environment::BLAME, &blame)
            .env_remove("TORCHELASTIC_USE_AGENT_STORE");
        match &options.master {
            Some((host, port)) => {
                command
                    .env("MASTER_ADDR", host)
                    .env("MASTER_PORT", port.to_string())
                    .env_remove(environment::RENDEZVOUS);
            }
            None => {
                command
                    .env("MASTER_ADDR", "127.0.0.1")
                    .env_remove("MASTER_PORT")
                    .env(environment::RENDEZVOUS, &rendezvous);
            }
        }
        if options.nodes == 1 {
            command.env(environment::SECRET, &secret);
        }
        if env::var_os("RAYON_NUM_THREADS").is_none() {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            command.env("RAYON_NUM_THREADS", (cores / ranks).max(1).to_string());
        }
        command.envs(options.variables.iter().cloned());
        processes
            .start(rank, command, options.prefix)
            .map_err(|error| DdpError::io(format!("starting rank {rank}"), error))?;
    }
    Ok(processes)
}
