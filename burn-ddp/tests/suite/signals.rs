//! Signals to the launcher, and to a program that was one.

use std::{
    os::unix::process::ExitStatusExt,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use crate::{
    launch::line,
    ranks::{PLAY, Rank, SCENARIO},
};

#[test]
fn afterwards_signals_do_what_they_did_before() {
    for signal in [Signal::SIGTERM, Signal::SIGUSR2] {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(PLAY)
            .env(SCENARIO, "launch and stay")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut program = Rank(child.unwrap());
        assert!(program.wait_for_steps(1).contains("STEP"));
        program.signal(signal);
        let start = Instant::now();
        let ended_by = program.0.wait().unwrap().signal();
        assert_eq!(ended_by, Some(signal as i32));
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

/// The command, with scripts as ranks that say something at first; once all have, what it is told.
fn scripts(script: &str, signals: &[Signal]) -> (bool, String) {
    let command = format!(
        "trap '' HUP; exec {} run -n 2 --grace 0.1 -- sh -c \"$SCRIPT\"",
        env!("CARGO_BIN_EXE_burn-ddp")
    );
    let child = Command::new("sh")
        .args(["-c", &command])
        .env("SCRIPT", script)
        .stdout(Stdio::piped())
        .spawn();
    let mut launcher = Rank(child.unwrap());
    launcher.wait_for_steps(2);
    for signal in signals {
        launcher.signal(*signal);
        std::thread::sleep(Duration::from_millis(400));
    }
    launcher.finish(Duration::from_secs(20))
}

#[test]
fn ranks_hear_what_slurm_has_to_say() {
    let script = "trap 'echo SAVED; exit 0' USR1; trap 'echo NO' USR2; echo STEP; \
                  while :; do sleep 0.05; done";
    // Under nohup, the end of the terminal is nothing to it.
    let signals = [Signal::SIGHUP, Signal::SIGUSR2, Signal::SIGUSR1];
    let (success, output) = scripts(script, &signals);
    assert!(success, "{output}");
    for rank in 0..2 {
        assert!(line(&output, rank, "SAVED").is_some(), "{output}");
        assert!(line(&output, rank, "NO").is_some(), "{output}");
    }
}
