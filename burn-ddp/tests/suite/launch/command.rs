//! The command's arguments, what it prints, and its exit code.

use std::process::Command;

use super::{line, restarts::attempts};
use crate::suite::ranks::{FOLDER, PLAY, SCENARIO};

/// The command, whose ranks play a scenario.
pub(super) fn command(arguments: &[&str], scenario: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-ddp"));
    command.arg("run").args(arguments).arg("--");
    command.arg(std::env::current_exe().unwrap()).args(PLAY);
    command.env(SCENARIO, scenario);
    command
}

#[test]
fn a_name_stands_for_the_number_of_ranks() {
    let run = |n: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-ddp"));
        let script = "echo rank $RANK of $WORLD_SIZE";
        command.args([
            "run",
            "--no-prefix",
            "--nproc-per-node",
            n,
            "--",
            "sh",
            "-c",
            script,
        ]);
        command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap()
    };
    let cores = std::thread::available_parallelism().unwrap().get();
    for name in ["cpu", "auto"] {
        let output = run(name);
        assert!(output.status.success(), "{output:?}");
        let printed = String::from_utf8(output.stdout).unwrap();
        let mut lines: Vec<&str> = printed.lines().collect();
        lines.sort_unstable();
        let mut expected: Vec<String> = (0..cores)
            .map(|rank| format!("rank {rank} of {cores}"))
            .collect();
        expected.sort_unstable();
        assert_eq!(lines, expected, "{name}");
    }
    let output = run("gpu");
    assert!(!output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("hidden by CUDA_VISIBLE_DEVICES"), "{error}");
}

/// What `burn-ddp run` prints with these arguments.
fn printed(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-ddp"));
    let output = command.args(["run", "--no-prefix"]).args(arguments);
    let output = output.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn arguments_are_as_of_torchrun() {
    // All that follows the program is its own, whether or not `--` is before it.
    let script = "echo $WORLD_SIZE $0 $*";
    let own = ["sh", "-c", script, "zero", "--", "--grace", "-n"];
    for dashes in [&[][..], &["--"]] {
        let arguments = [&["--nproc_per_node=1"], dashes, &own].concat();
        assert_eq!(printed(&arguments), "1 zero -- --grace -n\n");
    }
    let script = ["sh", "-c", "echo $MASTER_ADDR:$MASTER_PORT"];
    for (arguments, master) in [
        (&["--master", "127.0.0.1:2345"][..], "127.0.0.1:2345"),
        (&["--master-port", "2345"], "127.0.0.1:2345"),
        (
            &["--master_addr=10.0.0.1", "--master_port=2345"],
            "10.0.0.1:2345",
        ),
        (&["--master-addr", "10.0.0.1"], "10.0.0.1:29500"),
    ] {
        assert_eq!(
            printed(&[arguments, &script].concat()),
            format!("{master}\n")
        );
    }
}

#[test]
fn predictions_of_no_sense_are_refused() {
    let simulate = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-ddp"));
        let arguments = command.arg("simulate").args(arguments);
        let output = arguments.output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let usual = ["--compute-ms", "100", "--gradient-mb", "100"];
    assert_eq!(simulate(&usual).0, Some(0));
    for (wrong, why) in [
        (
            ["--compute-ms", "1e300", "--gradient-mb", "1"],
            "--compute-ms",
        ),
        (["--compute-ms", "1", "--gradient-mb", "1e8"], "--bucket-mb"),
    ] {
        let (code, text) = simulate(&wrong);
        assert!(code == Some(2) && text.contains(why), "{code:?} {text}");
    }
}

#[test]
fn the_command_prefixes_output_and_returns_the_ranks_code() {
    let run = |scenario: &str, arguments: &[&str]| command(arguments, scenario).output().unwrap();
    let output = run("sum", &["-n", "2"]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for rank in 0..2 {
        assert!(line(&text, rank, "RESULT ok").is_some(), "{text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let mut count = command(&["-n", "2", "--max-restarts", "2"], "count");
    let count = count.env(FOLDER, folder.path()).output().unwrap();
    assert!(count.status.success());
    assert_eq!(attempts(folder.path()).len(), 3);
    let said = String::from_utf8_lossy(&count.stderr);
    for why in [
        "rank 1 failed: it was killed by SIGKILL; starting all ranks again (1 of 2)",
        "rank 1 failed: it ended with exit code 9; starting all ranks again (2 of 2)",
    ] {
        assert!(said.contains(why), "{said}");
    }
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
        &["--master", "host:1", "--master-port", "2"],
        &["--nnodes", "2", "--master-port", "2"],
        &["--nnodes", "2"],
        &["-n", "x"],
    ] {
        assert_eq!(run("sum", wrong).status.code(), Some(2), "{wrong:?}");
    }
}
