//! Ranks that the launcher starts again when one has failed.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use nix::sys::signal::Signal;

use super::{
    command::command,
    ends::{launcher, wait_for_end},
    failed, play, spawn,
};
use crate::suite::ranks::FOLDER;

/// What the attempts left in their folder.
pub(super) fn attempts(folder: &Path) -> Vec<String> {
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
    assert_eq!(failed(result), (1, Some(9)));
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

/// As when a job's output goes to a program that ends, or to a terminal that is closed.
#[test]
fn ranks_start_again_although_nobody_reads_what_is_said() {
    let run = |mut command: Command| {
        let (_, nobody) = std::io::pipe().unwrap();
        let status = command.stdout(Stdio::null()).stderr(nobody).status();
        status.unwrap().code()
    };
    let folder = tempfile::tempdir().unwrap();
    let mut count = command(&["-n", "2", "--max-restarts", "2"], "count");
    count.env(FOLDER, folder.path());
    assert_eq!(run(count), Some(0));
    assert_eq!(attempts(folder.path()).len(), 3);
    let fails = command(&["-n", "2", "--grace", "0.5"], "exit 7");
    assert_eq!(run(fails), Some(7));
}
