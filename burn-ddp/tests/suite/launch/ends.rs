//! How all that ranks have started ends with the launcher or the job.

use std::{
    io::{BufRead, BufReader},
    thread,
    time::{Duration, Instant},
};

use burn_ddp::launch::{self, LaunchOptions};
use nix::sys::signal::Signal;

use crate::suite::ranks::{Rank, player};

/// A launcher in a process of its own, and the ids of its ranks.
pub(super) fn launcher(scenario: &str) -> (Rank, Vec<i32>) {
    let mut launcher = Rank(player(scenario).spawn().unwrap());
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

pub(super) fn wait_for_end(pids: &[i32]) {
    let start = Instant::now();
    while pids.iter().any(|pid| is_running(*pid)) {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "a rank outlived its launcher"
        );
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn ranks_end_with_their_launcher() {
    for scenario in ["launch", "launch on threads"] {
        for signal in [Signal::SIGKILL, Signal::SIGTERM] {
            let (launcher, pids) = launcher(scenario);
            launcher.signal(signal);
            wait_for_end(&pids);
        }
    }
}

#[test]
fn what_scripts_start_ends_with_the_launcher() {
    let (killed, pids) = launcher("launch scripts");
    killed.signal(Signal::SIGKILL);
    wait_for_end(&pids);
    let (asked, pids) = launcher("launch scripts");
    asked.signal(Signal::SIGTERM);
    wait_for_end(&pids);
    asked.finish(Duration::from_secs(20));
}

#[test]
fn what_ranks_leave_running_is_ended() {
    let folder = tempfile::tempdir().unwrap();
    let script = |script: &str| {
        let options = LaunchOptions::new()
            .arguments(["-c", script])
            .variable("FOLDER", folder.path())
            .prefix_output(true)
            .grace(Duration::from_millis(200));
        let start = Instant::now();
        launch::spawn("sh", 2, options).unwrap();
        assert!(start.elapsed() < Duration::from_secs(15));
    };
    // It knows nothing of being asked to end.
    script("trap '' TERM; sleep 100 & echo $! > $FOLDER/pid-$RANK");
    let pid = |rank: usize| {
        let text = std::fs::read_to_string(folder.path().join(format!("pid-{rank}"))).unwrap();
        text.trim().parse().unwrap()
    };
    wait_for_end(&[pid(0), pid(1)]);
    // Out of reach, it holds a pipe that the launcher reads.
    script("setsid sleep 20 & exit 0");
}

#[test]
fn ranks_that_do_not_stop_when_asked_are_killed_after_a_while() {
    let mut launcher = Rank(player("launch with little time to stop").spawn().unwrap());
    launcher.wait_for_steps(2);
    let start = Instant::now();
    launcher.signal(Signal::SIGTERM);
    launcher.succeed(20);
    assert!(start.elapsed() >= Duration::from_millis(300));
}
