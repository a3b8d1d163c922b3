//! Detects ranks that a signal has stopped. Nothing else would tell the user why a job stands still.

use nix::{sys::signal::Signal, unistd::Pid};

/// The signal that has stopped a child of this process since the last call, if one has.
#[cfg(target_os = "linux")]
pub(super) fn stopped_by(child: Pid) -> Option<Signal> {
    use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

    // Does not ask for the child's end, which `try_wait` reports.
    let stops = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG;
    match waitid(Id::Pid(child), stops) {
        Ok(WaitStatus::Stopped(_, signal)) => Some(signal),
        _ => None,
    }
}

/// Not available: these systems cannot report stops alone.
#[cfg(not(target_os = "linux"))]
pub(super) fn stopped_by(_: Pid) -> Option<Signal> {
    None
}

/// The launcher's message about a stopped rank.
pub(super) fn describe(rank: usize, child: Pid, signal: Signal) -> String {
    let what_to_do = match signal {
        Signal::SIGTTIN | Signal::SIGTTOU => {
            "it wanted the terminal, which a rank cannot have; end the job, and keep the program from that".into()
        }
        _ => format!("`kill -CONT {child}` lets it go on"),
    };
    format!("rank {rank} was stopped by {signal}, and others may wait for it: {what_to_do}")
}
