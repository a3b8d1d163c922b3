//! Makes ranks end with their launcher.

use std::{fs, sync::Once, thread, time::Duration};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::{Pid, getppid},
};

use crate::{DdpError, environment};

/// How often a rank checks its launcher, where the system does not report the launcher's end.
const LOOK: Duration = Duration::from_millis(200);

/// What tells the namespace of this process's number from others, in which processes have other numbers. Empty where there are none.
pub(super) fn namespace() -> String {
    let link = fs::read_link("/proc/self/ns/pid");
    link.map_or_else(
        |_| String::new(),
        |link| link.to_string_lossy().into_owned(),
    )
}

/// Makes this process end when its launcher ends, which has the number `parent` in a namespace. A process in another one (of a
/// container, say) cannot see it.
pub(crate) fn die_with(parent: usize, of: Option<String>) -> Result<(), DdpError> {
    if of.is_some_and(|of| of != namespace()) {
        log::debug!(
            "burn-ddp: the launcher is in another PID namespace, so this rank does not end with it"
        );
        return Ok(());
    }
    let pid = Pid::from_raw(parent as i32);
    let is_parent = getppid() == pid;
    #[cfg(target_os = "linux")]
    if is_parent {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)
            .map_err(|error| DdpError::io("tying this process to its launcher", error.into()))?;
    }
    // The launcher may have ended before the call above.
    if getppid() != pid && has_ended(pid) {
        return Err(DdpError::Environment {
            variable: environment::PARENT.into(),
            problem: format!("the launcher, process {parent}, has ended"),
        });
    }
    if !(is_parent && is_told_for_good()) {
        // If this process was started by a script, the system reports the script's end and not the launcher's.
        watch(pid, is_parent)?;
    }
    Ok(())
}

/// Whether the system reports the parent's end for as long as this process lives. On Linux, the request ends with the thread
/// that made it.
fn is_told_for_good() -> bool {
    #[cfg(target_os = "linux")]
    return nix::unistd::gettid() == Pid::this();
    #[cfg(not(target_os = "linux"))]
    false
}

fn has_ended(pid: Pid) -> bool {
    kill(pid, None) == Err(Errno::ESRCH)
}

/// Starts a thread that watches the launcher.
fn watch(launcher: Pid, is_parent: bool) -> Result<(), DdpError> {
    static STARTED: Once = Once::new();
    let mut result = Ok(());
    STARTED.call_once(|| {
        let thread = thread::Builder::new().name("ddp-launcher".into());
        let started = thread.spawn(move || {
            // A process loses its parent when that ends, even if nobody has asked for the parent's exit code yet.
            while !(has_ended(launcher) || (is_parent && getppid() != launcher)) {
                thread::sleep(LOOK);
            }
            // The same signal as from `set_pdeathsig`. A process is always allowed to kill itself.
            let _ = kill(Pid::this(), Signal::SIGKILL);
        });
        result = started.map(drop);
    });
    result.map_err(|error| DdpError::io("starting a thread that watches the launcher", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_in_another_namespace_is_not_looked_for() {
        // No process has this number.
        let nobody = i32::MAX as usize;
        die_with(nobody, Some("pid:[1]".into())).unwrap();
        for own in [None, Some(namespace())] {
            let error = die_with(nobody, own).unwrap_err();
            assert!(error.to_string().contains("has ended"), "{error}");
        }
    }
}
