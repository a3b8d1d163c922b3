//! Launchers on several machines.

use std::{
    io::Read,
    path::Path,
    process::{Command, Output, Stdio},
};

use nix::sys::signal::Signal;

use super::{command::command, line, restarts::attempts};
use crate::suite::{
    faults::free_port,
    ranks::{FOLDER, Rank},
};

/// Launchers on this machine that play two machines.
fn two_machines(ranks: usize, arguments: &[&str], scenario: &str, timeout: &str) -> [Command; 2] {
    let master = format!("127.0.0.1:{}", free_port());
    ["0", "1"].map(|node| {
        let ranks = ranks.to_string();
        let own = [
            "-n",
            &ranks,
            "--nnodes",
            "2",
            "--node-rank",
            node,
            "--master",
            &master,
            "--grace",
            "2",
        ];
        let mut command = command(&[&own, arguments].concat(), scenario);
        command
            .env("BURN_DDP_TIMEOUT", timeout)
            .env("BURN_DDP_SECRET", "of both machines")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    })
}

/// What two machines print.
fn machines(ranks: usize, arguments: &[&str], scenario: &str, folder: &Path) -> Vec<Output> {
    let launchers = two_machines(ranks, arguments, scenario, "60")
        .map(|mut command| command.env(FOLDER, folder).spawn().unwrap());
    let outputs = launchers.into_iter().map(|it| it.wait_with_output());
    outputs.map(Result::unwrap).collect()
}

#[test]
fn machines_meet_at_a_master() {
    let folder = tempfile::tempdir().unwrap();
    for (node, output) in machines(2, &[], "sum", folder.path()).iter().enumerate() {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        for rank in [2 * node, 2 * node + 1] {
            // 0.5 + 1.5 + 2.5 + 3.5
            assert!(line(&text, rank, "RESULT ok 8 8").is_some(), "{text}");
        }
    }
    let outputs = machines(1, &["--max-restarts", "2"], "count", folder.path());
    for output in outputs {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
    }
    let all = ["attempt-0-from-0", "attempt-1-from-2", "attempt-2-from-4"];
    assert_eq!(attempts(folder.path()), all);
}

/// Ctrl-C on one of two machines: the other starts again once, as it does when a rank of that one has failed.
#[test]
fn a_machine_that_waits_in_vain_does_not_start_again() {
    let check = |interrupted: usize| {
        let mut launchers = two_machines(1, &["--max-restarts", "2"], "loop", "10")
            .map(|mut command| Rank(command.spawn().unwrap()));
        let printed = launchers[interrupted].wait_for_steps(1);
        assert!(printed.contains("STEP"), "{printed}");
        launchers[interrupted].signal(Signal::SIGINT);
        let mut errors = launchers[1 - interrupted].0.stderr.take().unwrap();
        for launcher in launchers {
            launcher.fail(100);
        }
        let mut said = String::new();
        errors.read_to_string(&mut said).unwrap();
        assert!(said.contains("starting all ranks again (1 of 2)"), "{said}");
        assert!(!said.contains("(2 of 2)"), "{said}");
        assert!(said.contains("ranks did not appear in time"), "{said}");
    };
    // The machine with rank 0 waits for the other to come, the other for rank 0 to listen.
    std::thread::scope(|scope| {
        scope.spawn(|| check(0));
        check(1);
    });
}
