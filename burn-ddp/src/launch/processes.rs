//! The processes of the ranks, from their start to their end.
//!
//! Each rank leads a process group of its own, so that a signal reaches whatever a script has started
//! too, and a rank has ended when its whole group has.

use std::{
    io::{self, IsTerminal},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tempfile::TempDir;

use super::{
    output::Output,
    signals::{Signals, ends},
};
use crate::DdpError;

/// How often the launcher looks after its processes.
const LOOK: Duration = Duration::from_millis(10);

/// The processes of the ranks. They are killed when this is dropped.
pub(super) struct Processes {
    running: Vec<Rank>,
    output: Vec<Output>,
    interrupted: bool,
    /// Where they meet.
    _folder: TempDir,
}

struct Rank {
    number: usize,
    child: Child,
    /// The child has ended, but not yet all that it has started.
    ended: bool,
}

impl Rank {
    fn group(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    fn signal(&self, signal: Signal) {
        // One that has just ended needs no signal.
        let _ = killpg(self.group(), signal);
    }

    /// Whether the child has ended and nothing of its group is left.
    fn is_gone(&self) -> bool {
        self.ended && killpg(self.group(), None).is_err()
    }
}

impl Processes {
    pub(super) fn new(folder: TempDir) -> Self {
        Self {
            running: Vec::new(),
            output: Vec::new(),
            interrupted: false,
            _folder: folder,
        }
    }

    /// Whether a signal asked the job to end.
    pub(super) fn interrupted(&self) -> bool {
        self.interrupted
    }

    pub(super) fn start(
        &mut self,
        number: usize,
        mut command: Command,
        prefix: bool,
    ) -> io::Result<()> {
        command.process_group(0);
        if io::stdin().is_terminal() {
            // A group in the background that reads from a terminal is stopped.
            command.stdin(Stdio::null());
        }
        if prefix {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let mut child = command.spawn()?;
        if let Some(output) = child.stdout.take() {
            let sink = || Box::new(io::stdout()) as _;
            self.output.push(Output::copy(number, output, sink));
        }
        if let Some(output) = child.stderr.take() {
            let sink = || Box::new(io::stderr()) as _;
            self.output.push(Output::copy(number, output, sink));
        }
        self.running.push(Rank {
            number,
            child,
            ended: false,
        });
        Ok(())
    }

    /// Looks after the processes until the last has ended.
    pub(super) fn supervise(
        &mut self,
        signals: &mut Signals,
        grace: Duration,
    ) -> Result<(), DdpError> {
        let mut failure: Option<(usize, ExitStatus)> = None;
        let mut next: Option<(Instant, Signal)> = None;
        while !self.running.is_empty() {
            for signal in signals.pending() {
                self.signal(signal);
                if ends(signal) {
                    self.interrupted = true;
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
            }
            if failure.is_some() || self.running.iter().all(|rank| rank.ended) {
                // Whoever is left has this long.
                next.get_or_insert((Instant::now() + grace, Signal::SIGTERM));
            }
            if let Some((at, signal)) = next
                && Instant::now() >= at
            {
                self.signal(signal);
                if signal == Signal::SIGKILL {
                    // A zombie that nobody waits for keeps its group for ever.
                    self.running.retain(|rank| !rank.ended);
                }
                next = Some((Instant::now() + grace, Signal::SIGKILL));
            }
            thread::sleep(LOOK);
        }
        self.finish_output(signals);
        failure.map_or(Ok(()), |(rank, status)| {
            Err(DdpError::RankFailed {
                rank,
                status: describe(status),
                code: status.code(),
            })
        })
    }

    /// The children that have ended since the last time.
    fn ended(&mut self) -> Result<Vec<(usize, ExitStatus)>, DdpError> {
        let mut ended = Vec::new();
        for rank in self.running.iter_mut().filter(|rank| !rank.ended) {
            let status = rank.child.try_wait().map_err(|error| {
                DdpError::io(format!("waiting for rank {}", rank.number), error)
            })?;
            rank.ended = status.is_some();
            ended.extend(status.map(|status| (rank.number, status)));
        }
        self.running.retain(|rank| !rank.is_gone());
        Ok(ended)
    }

    fn signal(&self, signal: Signal) {
        self.running.iter().for_each(|rank| rank.signal(signal));
    }

    /// Waits for the last lines, unless a signal asks this process to end.
    fn finish_output(&mut self, signals: &mut Signals) {
        let mut outputs: Vec<_> = self.output.drain(..).map(Output::finish).collect();
        loop {
            outputs.retain_mut(|output| output.is_coming());
            let interrupted = signals.pending().into_iter().any(ends);
            self.interrupted |= interrupted;
            if outputs.is_empty() || interrupted {
                return;
            }
            thread::sleep(LOOK);
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for rank in &mut self.running {
            rank.signal(Signal::SIGKILL);
            // Nothing is left to do when it cannot be waited for.
            let _ = rank.child.wait();
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
