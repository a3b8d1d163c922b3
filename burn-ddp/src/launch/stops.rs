//! Ranks that a signal has stopped: nothing else would say why a job stands still.

use nix::{sys::signal::Signal, unistd::Pid};

/// The signal that has stopped a child of this process, if one has since the last time.
#[cfg(target_os = "linux")]
pub(super) fn stopped_by(child: Pid) -> Option<Signal> {
    use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

    // Leaves its end to those who wait for that.
    let stops = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG;
    match waitid(Id::Pid(child), stops) {
        Ok(WaitStatus::Stopped(_, signal)) => Some(signal),
        _ => None,
    }
}

/// There is no asking for stops alone.
#[cfg(not(target_os = "linux"))]
pub(super) fn stopped_by(_: Pid) -> Option<Signal> {
    None
}

/// What the launcher says of it.
pub(super) fn describe(rank: usize, child: Pid, signal: Signal) -> String {
    let what_to_do = match signal {
        Signal::SIGTTIN | Signal::SIGTTOU => {
            "it wanted the terminal, which a rank cannot have; end the job, and keep the program from that".into()
        }
        _ => format!("`kill -CONT {child}` lets it go on"),
    };
    format!("rank {rank} was stopped by {signal}, and others may wait for it: {what_to_do}")
}
