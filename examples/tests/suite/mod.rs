//! One module for each topic, and functions that run the program.

mod arguments;
mod precision;
mod ranks;
mod resume;

use std::path::Path;
use std::process::{Command, Output};

use examples::metrics::{Metrics, Row};

use crate::program::program;

/// The program with a network so small that a step takes milliseconds, with one thread for each rank. It writes to `out`, and
/// computes in f32 unless `args` have another precision.
fn small(out: &Path, args: &[&str]) -> Command {
    let mut command = plain(args);
    if !args.contains(&"--precision") {
        command.args(["--precision", "f32"]);
    }
    command.args(["--depth", "8", "--width", "2", "--timeout", "20", "--out"]);
    command.arg(out).env("RAYON_NUM_THREADS", "1");
    command
}

/// The program, without environment variables of launchers.
fn plain(args: &[&str]) -> Command {
    let mut command = Command::new(program("cifar_resnet_ddp"));
    command.args(args);
    for (name, _) in std::env::vars() {
        if [
            "RANK",
            "WORLD_SIZE",
            "LOCAL_",
            "MASTER_",
            "OMPI_",
            "PMI_",
            "SLURM_",
        ]
        .iter()
        .any(|p| name.starts_with(p))
        {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command that must succeed, and returns what it printed.
fn succeed(mut command: Command) -> String {
    let output = command.output().expect("the program starts");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{:?}\n{stdout}\n{}",
        output.status,
        stderr(&output)
    );
    stdout
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn rows(out: &Path) -> Vec<Row> {
    Metrics::read(&out.join("metrics.csv"))
}
