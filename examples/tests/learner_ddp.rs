//! Runs the built example as a user does, for two epochs, the second of them in another run.

mod program;

use std::path::Path;
use std::process::Command;

use program::program;

/// What a run prints on stdout.
fn run(epochs: &str, folder: &Path) -> String {
    let options = ["--width", "2", "--batch-size", "240", "--epochs", epochs];
    let output = Command::new(program("learner_ddp"))
        .args(options)
        .arg("--out")
        .arg(folder)
        .output()
        .expect("the program starts");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn the_learner_trains_on_two_ranks_and_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoint");
    run("1", folder.path());
    let files = |epoch| ["model", "optim", "scheduler"].map(|part| format!("{part}-{epoch}.bpk"));
    assert_eq!(names(&checkpoints), files(1));
    let before = std::fs::read(checkpoints.join("model-1.bpk")).unwrap();
    let printed = run("2", folder.path());
    let mut both = [files(1), files(2)].concat();
    both.sort();
    assert_eq!(names(&checkpoints), both);
    // The second run has gone on from there, and took one epoch.
    assert_eq!(
        std::fs::read(checkpoints.join("model-1.bpk")).unwrap(),
        before
    );
    assert!(printed.contains("Accuracy"), "{printed}");
    assert!(folder.path().join("experiment.log").exists());
}

#[test]
fn nothing_may_be_0() {
    for option in ["--ranks", "--epochs", "--width", "--batch-size"] {
        let mut command = Command::new(program("learner_ddp"));
        let output = command.args([option, "0"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(option), "{message}");
    }
}
