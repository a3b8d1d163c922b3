//! Tests that a run which is killed and resumed has the same result as an uninterrupted one, bit for bit.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::suite::{rows, small, succeed};

/// Two epochs of eight steps, with a checkpoint every third step. Most checkpoints are within an epoch.
const RUN: [&str; 7] = [
    "--ranks",
    "--batch-size",
    "--epochs",
    "2",
    "--checkpoint-every",
    "3",
    "--quiet",
];

fn run(out: &Path, ranks: usize, more: &[&str]) -> std::process::Command {
    let batch = (176 / ranks).to_string();
    let ranks = ranks.to_string();
    let [ranks_option, batch_option, rest @ ..] = RUN;
    let args = [
        &[ranks_option, &ranks, batch_option, &batch][..],
        &rest,
        more,
    ]
    .concat();
    small(out, &args)
}

/// The line of the table by which models can be compared.
fn parameters(table: &str) -> String {
    table
        .lines()
        .find(|line| line.starts_with("Parameters"))
        .expect(table)
        .to_owned()
}

/// The bits of the losses.
fn losses(out: &Path) -> Vec<u64> {
    rows(out).iter().map(|row| row.loss.to_bits()).collect()
}

fn kill_and_resume(ranks: usize, kills: &[usize]) {
    let whole = tempfile::tempdir().unwrap();
    let expected = parameters(&succeed(run(whole.path(), ranks, &[])));
    assert_eq!(losses(whole.path()).len(), 16);

    let out = tempfile::tempdir().unwrap();
    for (attempt, &rows_before) in kills.iter().enumerate() {
        let more: &[&str] = if attempt == 0 { &[] } else { &["--resume"] };
        let mut child = run(out.path(), ranks, more)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let started = Instant::now();
        while rows(out.path()).len() < rows_before {
            assert!(started.elapsed() < Duration::from_secs(60), "no steps");
            assert_eq!(
                child.try_wait().unwrap(),
                None,
                "ended before it could be killed"
            );
            sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let resumed = parameters(&succeed(run(out.path(), ranks, &["--resume"])));
    assert_eq!(resumed, expected);
    assert_eq!(losses(out.path()), losses(whole.path()));
}

#[test]
fn one_rank_killed_in_mid_epoch() {
    kill_and_resume(1, &[5]);
}

#[test]
fn one_rank_killed_before_its_first_checkpoint_and_again_and_again() {
    kill_and_resume(1, &[1, 7, 11]);
}

#[test]
fn two_ranks_killed_with_their_launcher() {
    kill_and_resume(2, &[7]);
}

/// The scales of fp8 come from the amaxes of both ranks. After one step a history has nothing but those of that step.
#[test]
fn two_ranks_resume_in_fp8_from_the_amaxes_of_both() {
    let fp8 = ["--precision", "fp8"];
    let whole = tempfile::tempdir().unwrap();
    let expected = parameters(&succeed(run(whole.path(), 2, &fp8)));
    let out = tempfile::tempdir().unwrap();
    succeed(run(
        out.path(),
        2,
        &[&fp8[..], &["--max-steps", "1"]].concat(),
    ));
    let resumed = succeed(run(out.path(), 2, &[&fp8[..], &["--resume"]].concat()));
    assert_eq!(parameters(&resumed), expected);
    assert_eq!(losses(out.path()), losses(whole.path()));
}

#[test]
fn a_run_ended_by_max_steps_goes_on() {
    let whole = tempfile::tempdir().unwrap();
    let expected = parameters(&succeed(run(whole.path(), 1, &[])));
    let out = tempfile::tempdir().unwrap();
    succeed(run(out.path(), 1, &["--max-steps", "10"]));
    assert_eq!(rows(out.path()).len(), 10);
    assert_eq!(
        parameters(&succeed(run(out.path(), 1, &["--resume"]))),
        expected
    );
    // Resumed once more, there is nothing left to do, and the table is the same.
    assert_eq!(
        parameters(&succeed(run(out.path(), 1, &["--resume"]))),
        expected
    );
}

#[test]
fn a_rate_of_many_digits_is_read_back_as_it_was() {
    let out = tempfile::tempdir().unwrap();
    let rates = ["--lr", "0.012345678901234567", "--max-steps", "1"];
    succeed(run(out.path(), 1, &rates));
    let resumed = [&rates[..], &["--resume"]].concat();
    succeed(run(out.path(), 1, &resumed));
}

#[test]
fn a_run_goes_on_when_its_data_have_moved() {
    let folder = tempfile::tempdir().unwrap();
    let (before, after) = (folder.path().join("before"), folder.path().join("after"));
    std::fs::create_dir(&before).unwrap();
    let batches = (1..=5).map(|number| format!("data_batch_{number}.bin"));
    for name in batches.chain(["test_batch.bin".to_owned()]) {
        let file = File::create(before.join(name)).unwrap();
        file.set_len(30_730_000).unwrap();
    }
    let out = tempfile::tempdir().unwrap();
    let with = |data: &Path, more: &[&str]| {
        let data = ["--data", data.to_str().unwrap(), "--max-steps", "1"];
        run(out.path(), 1, &[&data, more].concat())
    };
    succeed(with(&before, &[]));
    std::fs::rename(&before, &after).unwrap();
    succeed(with(&after, &["--resume"]));
}

#[test]
fn a_checkpoint_whose_writing_was_cut_off_is_not_taken() {
    let whole = tempfile::tempdir().unwrap();
    let expected = parameters(&succeed(run(whole.path(), 1, &[])));
    let out = tempfile::tempdir().unwrap();
    succeed(run(out.path(), 1, &["--max-steps", "6"]));
    let partial = out.path().join("checkpoints/.unfinished-9");
    std::fs::create_dir(&partial).unwrap();
    std::fs::write(partial.join("model.bpk"), b"cut off").unwrap();
    assert_eq!(
        parameters(&succeed(run(out.path(), 1, &["--resume"]))),
        expected
    );
    assert!(!partial.exists());
}

#[test]
fn a_new_run_keeps_the_checkpoints_of_the_last_one_aside() {
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().join("checkpoints");
    let names = |folder: &Path| {
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    succeed(run(out.path(), 1, &["--max-steps", "5"]));
    // Files that are not checkpoints must stay.
    std::fs::write(folder.join("notes.txt"), "mine").unwrap();
    std::fs::create_dir(folder.join("step-by-step")).unwrap();
    let others = ["notes.txt", "previous", "step-by-step"];
    for (steps, before) in [
        ("3", ["step-000000000003", "step-000000000005"].as_slice()),
        ("2", &["step-000000000003"]),
    ] {
        succeed(run(out.path(), 1, &["--max-steps", steps]));
        let mut expected = others.map(String::from).to_vec();
        expected.insert(2, format!("step-{:0>12}", steps));
        assert_eq!(names(&folder), expected);
        assert_eq!(names(&folder.join("previous")), before);
    }
    assert_eq!(std::fs::read(folder.join("notes.txt")).unwrap(), b"mine");
}
