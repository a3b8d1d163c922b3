//! Readers of the launcher's output, who take their time.

use std::{
    io::Read,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

#[test]
fn a_slow_reader_misses_nothing() {
    // More than one pipe holds, and less than the rank's and the launcher's do.
    let script = "yes \"$(printf '%099d' 7)\" | head -n 1000";
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_burn-ddp"))
        .args(["run", "-n", "1", "--", "sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    thread::sleep(Duration::from_millis(2500));
    let mut text = String::new();
    let mut output = launcher.stdout.take().unwrap();
    output.read_to_string(&mut text).unwrap();
    assert!(launcher.wait().unwrap().success());
    assert_eq!(text.lines().count(), 1000);
    assert!(text.lines().all(|line| line.len() == 4 + 99));
}

#[test]
fn a_reader_who_stops_reading_is_not_in_the_way_of_signals() {
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().join("pid");
    // Fills the pipe, and then has the launcher say that the rank was stopped.
    let script = "echo $$ > \"$NOTE\"; head -c 300000 /dev/zero | tr '\\0' '\\n' >&2 & sleep 1; kill -STOP $$";
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_burn-ddp"))
        .args(["run", "-n", "1", "--", "sh", "-c", script])
        .env("NOTE", &note)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    thread::sleep(Duration::from_millis(2500));
    kill(Pid::from_raw(launcher.id() as i32), Signal::SIGTERM).unwrap();
    let pid = std::fs::read_to_string(note).unwrap();
    let rank = Pid::from_raw(pid.trim().parse().unwrap());
    let start = Instant::now();
    while kill(rank, None).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(15), "it was not told");
        thread::sleep(Duration::from_millis(50));
    }
    launcher.kill().unwrap();
    launcher.wait().unwrap();
}
