//! The processes of the ranks, from their start to their end.
//!
//! Each rank leads a process group of its own, so that a signal also reaches the processes that a script has started.
//! A rank has ended when its whole group has.

use std::{
    io::{self, IsTerminal},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg, raise},
    unistd::Pid,
};
use tempfile::TempDir;

use super::{
    blame,
    failures::{End, Failures},
    output::{Output, say},
    signals::{Signals, ends},
    stops,
};
use crate::{DdpError, transport::FOREVER};

/// How often the launcher checks its processes.
const LOOK: Duration = Duration::from_millis(10);
/// Signals that ask to end count as one if they come within this time: `timeout` and some shells send their signal both to
/// a process and to its group.
const ONE: Duration = Duration::from_millis(200);

/// The processes of the ranks. They are killed when this is dropped.
pub(super) struct Processes {
    running: Vec<Rank>,
    output: Vec<Output>,
    /// When a signal first asked the job to end.
    interrupted: Option<Instant>,
    /// The folder where the ranks meet, and note why they fail.
    folder: TempDir,
}

struct Rank {
    number: usize,
    child: Child,
    /// The child has ended. Processes that it has started may still run.
    ended: bool,
    /// A signal has stopped the rank, and the user was told.
    stopped: bool,
}

impl Rank {
    fn group(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    fn signal(&self, signal: Signal) {
        // Fails if the group has just ended, which then needs no signal.
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
            interrupted: None,
            folder,
        }
    }

    /// Whether a signal asked the job to end.
    pub(super) fn interrupted(&self) -> bool {
        self.interrupted.is_some()
    }

    /// Whether a rank has waited in vain for ranks to appear.
    pub(super) fn waited_in_vain(&self, rank: usize) -> bool {
        blame::waited_in_vain(rank, self.folder.path())
    }

    pub(super) fn start(
        &mut self,
        number: usize,
        mut command: Command,
        prefix: bool,
    ) -> io::Result<()> {
        command.process_group(0);
        if io::stdin().is_terminal() {
            // The system stops a background group that reads from a terminal.
            command.stdin(Stdio::null());
        }
        // A program that finds a terminal on stdout may try to set it up, for which the system stops a background group, too.
        if prefix || io::stdout().is_terminal() {
            command.stdout(Stdio::piped());
        }
        if prefix {
            command.stderr(Stdio::piped());
        }
        let mut child = command.spawn()?;
        let before_lines = prefix.then_some(number);
        if let Some(output) = child.stdout.take() {
            let sink = || Box::new(io::stdout()) as _;
            self.output.push(Output::copy(before_lines, output, sink));
        }
        if let Some(output) = child.stderr.take() {
            let sink = || Box::new(io::stderr()) as _;
            self.output.push(Output::copy(before_lines, output, sink));
        }
        self.running.push(Rank {
            number,
            child,
            ended: false,
            stopped: false,
        });
        Ok(())
    }

    /// Supervises the processes until the last has ended.
    pub(super) fn supervise(
        &mut self,
        signals: &mut Signals,
        grace: Duration,
        stop_grace: Duration,
    ) -> Result<(), DdpError> {
        let [grace, stop_grace] = [grace, stop_grace].map(|limit| limit.min(FOREVER));
        let mut failures = Failures::default();
        // The launcher's own signal to the ranks that are left, and whether one was sent.
        let mut next: Option<(Instant, Signal)> = None;
        let mut told = false;
        while !self.running.is_empty() {
            for signal in signals.pending() {
                match signal {
                    Signal::SIGTSTP => {
                        let paused = self.suspend();
                        next = next.map(|(at, signal)| (at + paused, signal));
                    }
                    signal => self.pass_on(signal),
                }
            }
            let ended = self.ended()?;
            self.tell_of_stops();
            // Ranks that end after the launcher has sent SIGTERM are no failures, if others failed before.
            if !told || failures.is_empty() {
                failures.add(ended);
            }
            let is_ending = !failures.is_empty() || self.running.iter().all(|rank| rank.ended);
            match self.interrupted {
                // The ranks were asked to end, and may be saving a checkpoint: another SIGTERM could end them in it.
                Some(at) if !told => next = Some((at + stop_grace, Signal::SIGKILL)),
                None if is_ending => {
                    next.get_or_insert((Instant::now() + grace, Signal::SIGTERM));
                }
                _ => {}
            }
            if let Some((at, signal)) = next
                && Instant::now() >= at
            {
                self.signal(signal);
                told = true;
                next = Some((Instant::now() + grace, Signal::SIGKILL));
            }
            thread::sleep(LOOK);
        }
        self.finish_output(signals, grace);
        let blamed_by = |rank| blame::blamed_by(rank, self.folder.path());
        failures.first(blamed_by).map_or(Ok(()), |(rank, status)| {
            Err(DdpError::RankFailed {
                rank,
                status: describe(status),
                code: status.code(),
            })
        })
    }

    /// The children that have ended since the last time.
    fn ended(&mut self) -> Result<Vec<End>, DdpError> {
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

    /// Says on stderr which ranks a signal has stopped.
    fn tell_of_stops(&mut self) {
        for rank in self.running.iter_mut().filter(|rank| !rank.ended) {
            if let Some(signal) = stops::stopped_by(rank.group())
                && !rank.stopped
            {
                rank.stopped = true;
                let what = stops::describe(rank.number, rank.group(), signal);
                say(&what);
            }
        }
    }

    /// Forwards a signal to the ranks. A second signal that asks to end becomes SIGKILL.
    fn pass_on(&mut self, signal: Signal) {
        let signal = match self.interrupted {
            Some(at) if ends(signal) && at.elapsed() >= ONE => Signal::SIGKILL,
            _ => signal,
        };
        self.signal(signal);
        if ends(signal) {
            self.interrupted.get_or_insert_with(Instant::now);
        }
    }

    /// Stops the ranks and this process until the shell lets it go on, and returns for how long. Ctrl-Z does not reach the
    /// ranks, which would run on until they wait for this process to read what they print.
    fn suspend(&mut self) -> Duration {
        let start = Instant::now();
        self.signal(Signal::SIGSTOP);
        // Does not return before this process goes on. If it fails, the ranks go on at once.
        let _ = raise(Signal::SIGSTOP);
        self.signal(Signal::SIGCONT);
        let paused = start.elapsed();
        self.interrupted = self.interrupted.map(|at| at + paused);
        paused
    }

    fn signal(&mut self, signal: Signal) {
        for rank in &self.running {
            rank.signal(signal);
            if ends(signal) {
                // A rank that is stopped hears of it when it goes on.
                rank.signal(Signal::SIGCONT);
            }
        }
        if signal == Signal::SIGKILL {
            // A zombie that nobody waits for would keep its group alive forever.
            self.running.retain(|rank| !rank.ended);
        }
    }

    /// Waits for the last output, unless a signal asks this process to end. If one has before, this waits for `grace`.
    fn finish_output(&mut self, signals: &mut Signals, grace: Duration) {
        let mut outputs: Vec<_> = self.output.drain(..).map(Output::finish).collect();
        let end = self.interrupted.map(|_| Instant::now() + grace);
        loop {
            outputs.retain_mut(|output| output.is_coming());
            let interrupted = signals.pending().into_iter().any(ends);
            if interrupted {
                self.interrupted.get_or_insert_with(Instant::now);
            }
            let is_late = end.is_some_and(|end| Instant::now() >= end);
            if outputs.is_empty() || interrupted || is_late {
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
            // Nothing can be done if waiting fails.
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
