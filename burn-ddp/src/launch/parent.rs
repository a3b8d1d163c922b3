//! Ranks end with their launcher.

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::{Pid, getppid},
};

use crate::{DdpError, environment};

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
