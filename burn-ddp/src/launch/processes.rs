//! The processes of the ranks, from their start to their end.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use crate::DdpError;

/// How often the launcher looks after its processes.
const LOOK: Duration = Duration::from_millis(10);

/// The processes of the ranks. They are killed when this is dropped.
pub(super) struct Processes {
    running: Vec<(usize, Child)>,
    output: Vec<thread::JoinHandle<()>>,
    interrupted: bool,
    /// Where they meet.
    _folder: TempDir,
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
        rank: usize,
        mut command: Command,
        prefix: bool,
    ) -> io::Result<()> {
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
    pub(super) fn supervise(
        &mut self,
        signals: &mut Signals,
        grace: Duration,
    ) -> Result<(), DdpError> {
        let mut failure: Option<(usize, ExitStatus)> = None;
        let mut next: Option<(Instant, Signal)> = None;
        while !self.running.is_empty() {
            for signal in signals.pending() {
                if let Ok(signal) = Signal::try_from(signal) {
                    self.interrupted = true;
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
