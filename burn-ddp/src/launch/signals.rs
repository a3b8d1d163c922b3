//! Watches the signals to the launcher while its ranks run. Afterwards, the previous handlers are restored.

use std::{
    io, ptr,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU32, Ordering},
    },
};

use nix::{
    libc::c_int,
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
};

const WATCHED: [Signal; 7] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGTSTP,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// How often each watched signal has come.
static CAME: [AtomicU32; WATCHED.len()] = [const { AtomicU32::new(0) }; WATCHED.len()];

/// The signals' actions before anyone watched them.
struct Before {
    watchers: usize,
    actions: Vec<(Signal, SigAction)>,
}

static BEFORE: Mutex<Before> = Mutex::new(Before {
    watchers: 0,
    actions: Vec::new(),
});

fn before() -> MutexGuard<'static, Before> {
    BEFORE.lock().expect("no panic under lock")
}

/// The signal handler: counts a signal.
extern "C" fn note(number: c_int) {
    for (signal, came) in WATCHED.iter().zip(&CAME) {
        if *signal as c_int == number {
            came.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn set(signal: Signal, action: &SigAction) -> io::Result<SigAction> {
    // SAFETY: the action is one that the process had, the system's default, or `note` (or that of the test), which only adds
    // to atomic numbers, as a signal handler may.
    Ok(unsafe { sigaction(signal, action) }?)
}

/// Whether a signal asks a job to end. The meaning of the others is up to the ranks: with `--signal=USR1`, for instance,
/// Slurm announces that the time is nearly over.
pub(super) fn ends(signal: Signal) -> bool {
    use Signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

    matches!(signal, SIGINT | SIGTERM | SIGHUP | SIGQUIT)
}

/// A watch over the signals of this process. There may be several at a time, and each sees all signals.
pub(super) struct Signals {
    seen: [u32; WATCHED.len()],
}

impl Signals {
    pub(super) fn watch() -> io::Result<Self> {
        let mut before = before();
        before.watchers += 1;
        let signals = Self {
            seen: CAME.each_ref().map(|came| came.load(Ordering::SeqCst)),
        };
        if before.watchers == 1 {
            let handler = SigHandler::Handler(note);
            let ours = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
            let kept = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
            let watched = WATCHED.map(|signal| (signal, &ours));
            // If SIGCHLD is ignored, as under some supervisors, the system does not keep the exit codes of children.
            for (signal, ours) in watched.into_iter().chain([(Signal::SIGCHLD, &kept)]) {
                match set(signal, ours) {
                    // A program under nohup keeps running when its terminal is closed, and where a shell has no job control,
                    // nothing would let a program go on that Ctrl-Z has stopped.
                    Ok(old) if may_be_ignored(signal) && is_ignored(&old) => {
                        // This action was set a moment ago, so that setting it again works.
                        let _ = set(signal, &old);
                    }
                    // The program's own handler learns of its children from it.
                    Ok(old) if signal == Signal::SIGCHLD && keeps_exit_codes(&old) => {
                        let _ = set(signal, &old);
                    }
                    Ok(old) => before.actions.push((signal, old)),
                    Err(error) => {
                        // Dropping `signals` restores the actions that were changed.
                        drop(before);
                        drop(signals);
                        return Err(error);
                    }
                }
            }
        }
        Ok(signals)
    }

    /// The signals that have come since the last time.
    pub(super) fn pending(&mut self) -> Vec<Signal> {
        let mut pending = Vec::new();
        for (at, signal) in WATCHED.into_iter().enumerate() {
            let came = CAME[at].load(Ordering::SeqCst);
            if std::mem::replace(&mut self.seen[at], came) != came {
                pending.push(signal);
            }
        }
        pending
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        let mut before = before();
        before.watchers -= 1;
        if before.watchers > 0 {
            return;
        }
        for (signal, old) in before.actions.drain(..) {
            // An action that could be set can be restored. An action that the program has set in the meantime stays.
            if let Ok(current) = set(signal, &old)
                && !is_ours(signal, &current)
            {
                let _ = set(signal, &current);
            }
        }
    }
}

fn may_be_ignored(signal: Signal) -> bool {
    matches!(signal, Signal::SIGHUP | Signal::SIGTSTP)
}

fn is_ignored(action: &SigAction) -> bool {
    matches!(action.handler(), SigHandler::SigIgn)
}

fn keeps_exit_codes(action: &SigAction) -> bool {
    !is_ignored(action) && !action.flags().contains(SaFlags::SA_NOCLDWAIT)
}

fn is_ours(signal: Signal, action: &SigAction) -> bool {
    let ours: extern "C" fn(c_int) = note;
    match action.handler() {
        SigHandler::SigDfl => signal == Signal::SIGCHLD,
        SigHandler::Handler(handler) => ptr::fn_addr_eq(handler, ours),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    static CHILDREN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_: c_int) {
        CHILDREN.fetch_add(1, Ordering::SeqCst);
    }

    #[test]
    fn the_programs_own_handler_hears_of_its_children() {
        let own = SigAction::new(
            SigHandler::Handler(count),
            SaFlags::SA_RESTART,
            SigSet::empty(),
        );
        let before = set(Signal::SIGCHLD, &own).unwrap();
        let watch = Signals::watch().unwrap();
        assert!(Command::new("true").status().unwrap().success());
        assert!(CHILDREN.load(Ordering::SeqCst) > 0);
        drop(watch);
        set(Signal::SIGCHLD, &before).unwrap();
    }
}
