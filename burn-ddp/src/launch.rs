//! Starting the ranks of a job as processes of this machine.
//!
//! A program can start itself several times:
//!
//! ```no_run
//! use burn_ddp::{DdpError, ProcessGroup, is_distributed_env, launch};
//!
//! fn main() -> Result<(), DdpError> {
//!     if !is_distributed_env() {
//!         return launch::spawn_self(2, launch::LaunchOptions::new());
//!     }
//!     let group = ProcessGroup::init()?;
//!     println!("rank {} of {}", group.rank(), group.world_size());
//!     Ok(())
//! }
//! ```
//!
//! The ranks find each other through a file in a temporary folder, so that no port has to be
//! chosen in advance; a random secret keeps strangers out.

use std::{
    env,
    ffi::{OsStr, OsString},
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::{Pid, getppid},
};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM},
    iterator::Signals,
};

use crate::{DdpError, environment};

/// How often the launcher looks after its processes.
const LOOK: Duration = Duration::from_millis(10);

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
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LaunchOptions {
    /// One machine, this program's own arguments, output as it comes.
    pub fn new() -> Self {
        Self {
            arguments: None,
            variables: Vec::new(),
            master: None,
            nodes: 1,
            node_rank: 0,
            prefix: false,
            grace: Duration::from_secs(5),
        }
    }

    /// The program's arguments. Default for [`spawn_self`]: those this process was started with.
    pub fn arguments<S: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.arguments = Some(arguments.into_iter().map(Into::into).collect());
        self
    }

    /// An environment variable for all ranks.
    pub fn variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// The host and port where rank 0 listens (MASTER_ADDR, MASTER_PORT), instead of a port of its
    /// own choice. Needed on several machines.
    pub fn master(mut self, host: impl Into<String>, port: u16) -> Self {
        self.master = Some((host.into(), port));
        self
    }

    /// The number of machines and this machine's number among them. Each starts equally many ranks.
    /// All must have the same `BURN_DDP_SECRET` in the environment, or none.
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

    /// Whether to put the rank before each line of output.
    pub fn prefix_output(mut self, prefix: bool) -> Self {
        self.prefix = prefix;
        self
    }

    /// How long the other ranks may go on when one has failed, to report their own errors, and
    /// again from the request to end until they are killed. Default: 5 seconds.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }
}

/// Starts this program `ranks` times and waits for all to end. See [`spawn`].
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

/// Starts a program `ranks` times, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
/// (with [`LaunchOptions::master`]) MASTER_PORT, and what our own rendezvous needs, and waits for all
/// to end. Unless RAYON_NUM_THREADS is set, the ranks share the machine's cores evenly.
///
/// Signals that ask this process to end are passed on. When a rank fails, the others are ended.
/// The ranks end with this process, however it ends ([`ProcessGroup::init`] sees to it).
///
/// [`ProcessGroup::init`]: crate::ProcessGroup::init
///
/// # Errors
///
/// [`DdpError::RankFailed`] with the rank that failed first, or [`DdpError::Io`] when a process could
/// not be started.
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
            "several machines need the master's host and port".into(),
        ));
    }
    let failed = |what: &str| {
        let what = what.to_string();
        move |error| DdpError::io(what, error)
    };
    // Registered before the first process starts: no signal is lost.
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT]).map_err(failed("watching for signals"))?;
    let folder = tempfile::tempdir().map_err(failed("making a folder for the rendezvous"))?;
    let rendezvous = format!("file://{}", folder.path().join("master").display());
    let secret = format!("{:032x}", rand::random::<u128>());

    let mut processes = Processes {
        running: Vec::new(),
        output: Vec::new(),
    };
    for local_rank in 0..ranks {
        let rank = options.node_rank * ranks + local_rank;
        let mut command = Command::new(&program);
        command
            .args(options.arguments.iter().flatten())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", (ranks * options.nodes).to_string())
            .env("LOCAL_RANK", local_rank.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env(environment::PARENT, std::process::id().to_string())
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
            .map_err(failed(&format!("starting rank {rank}")))?;
    }
    processes.supervise(&mut signals, options.grace)
}

/// The processes of the ranks. They are killed when this is dropped.
struct Processes {
    running: Vec<(usize, Child)>,
    output: Vec<thread::JoinHandle<()>>,
}

impl Processes {
    fn start(&mut self, rank: usize, mut command: Command, prefix: bool) -> io::Result<()> {
        if prefix {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let mut child = command.spawn()?;
        if let Some(output) = child.stdout.take() {
            let copy = move || copy_lines(rank, output, || Box::new(io::stdout()));
            self.output.push(thread::spawn(copy));
        }
        if let Some(output) = child.stderr.take() {
            let copy = move || copy_lines(rank, output, || Box::new(io::stderr()));
            self.output.push(thread::spawn(copy));
        }
        self.running.push((rank, child));
        Ok(())
    }

    /// Looks after the processes until the last has ended.
    fn supervise(&mut self, signals: &mut Signals, grace: Duration) -> Result<(), DdpError> {
        let mut failure: Option<(usize, ExitStatus)> = None;
        let mut next: Option<(Instant, Signal)> = None;
        while !self.running.is_empty() {
            for signal in signals.pending() {
                if let Ok(signal) = Signal::try_from(signal) {
                    self.signal(signal);
                    next.get_or_insert((Instant::now() + grace, Signal::SIGTERM));
                }
            }
            let ended = self.ended()?;
            // A rank that was killed explains the errors of the others, if it is among them.
            let failed = ended
                .iter()
                .filter(|(_, status)| !status.success())
                .max_by_key(|(_, status)| status.signal().is_some());
            if let (None, Some(failed)) = (&failure, failed) {
                failure = Some(*failed);
                next.get_or_insert((Instant::now() + grace, Signal::SIGTERM));
            }
            if let Some((at, signal)) = next
                && Instant::now() >= at
            {
                self.signal(signal);
                next = Some((Instant::now() + grace, Signal::SIGKILL));
            }
            thread::sleep(LOOK);
        }
        for output in self.output.drain(..) {
            // A thread that only copies lines does not panic.
            let _ = output.join();
        }
        failure.map_or(Ok(()), |(rank, status)| {
            Err(DdpError::RankFailed {
                rank,
                status: describe(status),
                code: status.code(),
            })
        })
    }

    fn ended(&mut self) -> Result<Vec<(usize, ExitStatus)>, DdpError> {
        let mut ended = Vec::new();
        for (rank, child) in &mut self.running {
            let status = child.try_wait();
            let status =
                status.map_err(|error| DdpError::io(format!("waiting for rank {rank}"), error))?;
            ended.extend(status.map(|status| (*rank, status)));
        }
        self.running
            .retain(|(rank, _)| ended.iter().all(|(ended, _)| ended != rank));
        Ok(ended)
    }

    fn signal(&self, signal: Signal) {
        for (_, child) in &self.running {
            // One that has just ended needs no signal.
            let _ = kill(Pid::from_raw(child.id() as i32), signal);
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (_, child) in &mut self.running {
            // Nothing is left to do when it cannot be killed or waited for.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("it ended with exit code {code}"),
        (None, Some(number)) => match Signal::try_from(number) {
            Ok(signal) => format!("it was killed by {signal}"),
            Err(_) => format!("it was killed by signal {number}"),
        },
        (None, None) => status.to_string(),
    }
}

/// Copies output line by line, each after its rank.
fn copy_lines(rank: usize, output: impl Read, sink: impl Fn() -> Box<dyn Write>) {
    let mut lines = BufReader::new(output);
    let mut line = Vec::new();
    while matches!(lines.read_until(b'\n', &mut line), Ok(read) if read > 0) {
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        let mut whole = format!("[{rank}] ").into_bytes();
        whole.append(&mut line);
        // A closed output is the reader's wish.
        let _ = sink().write_all(&whole);
    }
}

/// Makes the system end this process when its launcher ends.
pub(crate) fn die_with(parent: usize) -> Result<(), DdpError> {
    let pid = Pid::from_raw(parent as i32);
    #[cfg(target_os = "linux")]
    if getppid() == pid {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)
            .map_err(|error| DdpError::io("tying this process to its launcher", error.into()))?;
    }
    // It may have ended before; between it and us there may be a shell.
    if getppid() != pid && kill(pid, None) == Err(Errno::ESRCH) {
        return Err(DdpError::Environment {
            variable: environment::PARENT.into(),
            problem: format!("the launcher, process {parent}, has ended"),
        });
    }
    Ok(())
}
