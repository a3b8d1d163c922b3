//! Signals to the launcher, and to a program that was one.

use std::{
    os::unix::process::ExitStatusExt,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use crate::suite::{
    launch::line,
    ranks::{Rank, player},
};

#[test]
fn afterwards_signals_do_what_they_did_before() {
    for signal in [Signal::SIGTERM, Signal::SIGUSR2] {
        let mut program = Rank(player("launch and stay").spawn().unwrap());
        assert!(program.wait_for_steps(1).contains("STEP"));
        program.signal(signal);
        let start = Instant::now();
        let ended_by = program.0.wait().unwrap().signal();
        assert_eq!(ended_by, Some(signal as i32));
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

/// The command, with scripts as ranks that say something at first; once all have, what it is told, and how long it
/// hears nothing more.
fn scripts(script: &str, options: &str, signals: &[(Signal, u64)]) -> (bool, String) {
    let command = format!(
        "trap '' HUP; exec {} run -n 2 {options} -- sh -c \"$SCRIPT\"",
        env!("CARGO_BIN_EXE_burn-ddp")
    );
    let child = Command::new("sh")
        .args(["-c", &command])
        .env("SCRIPT", script)
        .stdout(Stdio::piped())
        .spawn();
    let mut launcher = Rank(child.unwrap());
    launcher.wait_for_steps(2);
    for (signal, milliseconds) in signals {
        launcher.signal(*signal);
        std::thread::sleep(Duration::from_millis(*milliseconds));
    }
    launcher.finish(Duration::from_secs(20))
}

#[test]
fn ranks_hear_what_slurm_has_to_say() {
    let script = "trap 'echo SAVED; exit 0' USR1; trap 'echo NO' USR2; echo STEP; \
                  while :; do sleep 0.05; done";
    // Under nohup, the end of the terminal is nothing to it.
    let signals = [Signal::SIGHUP, Signal::SIGUSR2, Signal::SIGUSR1];
    let (success, output) = scripts(script, "--grace 0.1", &signals.map(|signal| (signal, 400)));
    assert!(success, "{output}");
    for rank in 0..2 {
        assert!(line(&output, rank, "SAVED").is_some(), "{output}");
        assert!(line(&output, rank, "NO").is_some(), "{output}");
    }
}

/// As under some supervisors: the system then keeps no exit codes, unless it is told to.
#[test]
fn ranks_are_waited_for_where_ends_of_children_were_ignored() {
    let ignoring = || {
        let mut command = Command::new("env");
        command.arg("--ignore-signal=CHLD");
        command
    };
    if !ignoring().arg("true").status().unwrap().success() {
        println!("skipped: this machine's `env` ignores no signals");
        return;
    }
    for (script, code) in [("sleep 0.$RANK; echo DONE", 0), ("sleep $RANK; exit 3", 3)] {
        let output = ignoring()
            .arg(env!("CARGO_BIN_EXE_burn-ddp"))
            .args([
                "run", "-n", "2", "--grace", "1e19", "--", "sh", "-c", script,
            ])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let said = (0..2).filter(|rank| line(&text, *rank, "DONE").is_some());
        assert_eq!(said.count(), if code == 0 { 2 } else { 0 }, "{output:?}");
        assert_eq!(output.status.code(), Some(code), "{output:?}");
    }
}

#[test]
fn who_asks_twice_does_not_wait() {
    let script = "trap '' INT TERM; echo STEP; while :; do sleep 0.05; done";
    for second in [Signal::SIGINT, Signal::SIGTERM] {
        let start = Instant::now();
        let (success, _) = scripts(
            script,
            "--stop-grace 100",
            &[(Signal::SIGINT, 400), (second, 0)],
        );
        assert!(!success);
        assert!(start.elapsed() < Duration::from_secs(15));
    }
}

/// `timeout` sends its signal to a process and to the group that this is in.
#[test]
fn a_signal_that_comes_twice_at_a_time_is_one() {
    let script = "trap 'trap \"\" INT; sleep 0.5; echo SAVED; exit 0' INT; echo STEP; \
                  while :; do sleep 0.05; done";
    let signals = [(Signal::SIGINT, 40), (Signal::SIGINT, 0)];
    let (success, output) = scripts(script, "--stop-grace 100", &signals);
    assert!(success, "{output}");
    for rank in 0..2 {
        assert!(line(&output, rank, "SAVED").is_some(), "{output}");
    }
}

/// A checkpoint takes longer than other ranks may take to report their errors.
#[test]
fn who_is_asked_to_end_has_time_to_save() {
    let script = "trap 'echo SAVING; sleep 2; echo SAVED; exit 0' TERM; echo STEP; \
                  while :; do sleep 0.05; done";
    let (success, output) = scripts(script, "--grace 0.2", &[(Signal::SIGTERM, 0)]);
    assert!(success, "{output}");
    for rank in 0..2 {
        assert!(line(&output, rank, "SAVED").is_some(), "{output}");
    }
    // They were asked once.
    assert_eq!(output.matches("SAVING").count(), 2, "{output}");
}

#[test]
fn who_does_not_end_in_time_is_killed() {
    let script = "trap 'echo ASKED' TERM; echo STEP; while :; do sleep 0.05; done";
    let start = Instant::now();
    let options = "--grace 100 --stop-grace 0.5";
    let (success, output) = scripts(script, options, &[(Signal::SIGTERM, 0)]);
    assert!(!success);
    assert!(start.elapsed() < Duration::from_secs(15));
    assert_eq!(output.matches("ASKED").count(), 2, "{output}");
}
