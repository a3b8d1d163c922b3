//! The launcher, in this process and as a command.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use burn_ddp::{
    DdpError,
    launch::{self, LaunchOptions},
};
use nix::sys::signal::Signal;

use crate::ranks::{FOLDER, PLAY, Rank, SCENARIO};

fn play(scenario: &str) -> LaunchOptions {
    LaunchOptions::new()
        .arguments(PLAY)
        .variable(SCENARIO, scenario)
        .grace(Duration::from_secs(2))
}

fn spawn(ranks: usize, options: LaunchOptions) -> Result<(), DdpError> {
    launch::spawn(std::env::current_exe().unwrap(), ranks, options)
}

#[test]
fn ranks_find_each_other() {
    for ranks in [1, 3] {
        spawn(ranks, play("sum")).unwrap();
    }
}

#[test]
fn ranks_find_each_other_at_a_master() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let error = spawn(2, play("sum").master("127.0.0.1", port)).unwrap_err();
    assert!(
        matches!(error, DdpError::RankFailed { rank: 0, .. }),
        "the port is busy: {error}"
    );
    drop(listener);
    spawn(2, play("sum").master("127.0.0.1", port)).unwrap();
}

#[test]
fn the_rank_that_failed_first_is_named() {
    let start = Instant::now();
    // Rank 1 exits while rank 0 would sleep for minutes.
    let error = spawn(2, play("exit 7")).unwrap_err();
    assert!(
        matches!(
            error,
            DdpError::RankFailed {
                rank: 1,
                code: Some(7),
                ..
            }
        ),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(10));
    let error = spawn(3, play("die")).unwrap_err();
    assert!(
        matches!(&error, DdpError::RankFailed { rank: 2, code: None, status }
        if status.contains("SIGKILL")),
        "{error}"
    );
}

/// What the attempts left in their folder.
fn attempts(folder: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("attempt")).collect();
    names.sort();
    names
}

#[test]
fn failed_ranks_start_again_from_their_checkpoint() {
    let run = |restarts: usize| {
        let folder = tempfile::tempdir().unwrap();
        let options = play("count")
            .variable(FOLDER, folder.path())
            .max_restarts(restarts);
        (spawn(2, options), attempts(folder.path()))
    };
    let (result, attempts) = run(2);
    result.unwrap();
    let all = ["attempt-0-from-0", "attempt-1-from-2", "attempt-2-from-4"];
    assert_eq!(attempts, all);
    // One restart is not enough: the last attempt's failure is what is reported.
    let (result, attempts) = run(1);
    let error = result.unwrap_err();
    assert!(
        matches!(
            error,
            DdpError::RankFailed {
                rank: 1,
                code: Some(9),
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(attempts, all[..2]);
}

#[test]
fn a_signal_is_no_failure_to_start_again_from() {
    let (launcher, pids) = launcher("launch with restarts");
    launcher.signal(Signal::SIGTERM);
    wait_for_end(&pids);
    let (_, output) = launcher.finish(Duration::from_secs(20));
    assert!(
        !output.contains("PID"),
        "no rank was started again: {output}"
    );
}

#[test]
fn mistakes_are_refused() {
    assert!(matches!(
        spawn(0, play("sum")),
        Err(DdpError::InvalidArgument(_))
    ));
    let several = play("sum").nodes(2, 0);
    assert!(matches!(
        spawn(1, several),
        Err(DdpError::InvalidArgument(_))
    ));
    let missing = launch::spawn("/no/such/program", 1, LaunchOptions::new());
    assert!(missing.unwrap_err().to_string().contains("starting rank 0"));
}

/// A launcher in a process of its own, and the ids of its ranks.
fn launcher(scenario: &str) -> (Rank, Vec<i32>) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(PLAY)
        .env(SCENARIO, scenario)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut launcher = Rank(child.unwrap());
    let mut lines = BufReader::new(launcher.0.stdout.as_mut().unwrap()).lines();
    let mut pids = Vec::new();
    while pids.len() < 2 {
        let line = lines.next().unwrap().unwrap();
        if let Some((_, pid)) = line.split_once("PID ") {
            pids.push(pid.parse().unwrap());
        }
    }
    (launcher, pids)
}

fn is_running(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    status.is_ok_and(|status| !status.contains(") Z "))
}

fn wait_for_end(pids: &[i32]) {
    let start = Instant::now();
    while pids.iter().any(|pid| is_running(*pid)) {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "a rank outlived its launcher"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn ranks_end_with_their_launcher() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let (launcher, pids) = launcher("launch");
        launcher.signal(signal);
        wait_for_end(&pids);
    }
}

#[test]
fn the_command_prefixes_output_and_returns_the_ranks_code() {
    let run = |scenario: &str, arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_burn-ddp"))
            .arg("run")
            .args(arguments)
            .arg("--")
            .arg(std::env::current_exe().unwrap())
            .args(PLAY)
            .env(SCENARIO, scenario)
            .output()
            .unwrap()
    };
    let output = run("sum", &["-n", "2"]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for rank in 0..2 {
        let line = text
            .lines()
            .find(|line| line.contains("RESULT ok") && line.starts_with(&format!("[{rank}] ")));
        assert!(line.is_some(), "{text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let count = Command::new(env!("CARGO_BIN_EXE_burn-ddp"))
        .args(["run", "-n", "2", "--max-restarts", "2", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(PLAY)
        .env(SCENARIO, "count")
        .env(FOLDER, folder.path())
        .output();
    assert!(count.unwrap().status.success());
    assert_eq!(attempts(folder.path()).len(), 3);
    let output = run("exit 7", &["-n", "2", "--grace", "0.5", "--no-prefix"]);
    assert_eq!(output.status.code(), Some(7));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains("rank 1 failed: it ended with exit code 7"),
        "{text}"
    );
    for wrong in [
        &["--nnodes", "2", "--node-rank", "2"][..],
        &["--master", "nowhere"],
        &["--nnodes", "2"],
        &["-n", "x"],
    ] {
        assert_eq!(run("sum", wrong).status.code(), Some(2), "{wrong:?}");
    }
}
