//! Tests of several ranks, which the program or others start.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::suite::{rows, small, stderr, succeed};

/// Waits until the child ends by itself. Panics if it does not within `limit`.
fn wait(child: &mut Child, limit: Duration) -> std::process::ExitStatus {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if started.elapsed() > limit {
            child.kill().unwrap();
            panic!("still running after {limit:?}");
        }
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn two_ranks_train_evaluate_and_report_once() {
    let out = tempfile::tempdir().unwrap();
    let text = succeed(small(
        out.path(),
        &["--ranks", "2", "--batch-size", "16", "--max-steps", "5"],
    ));
    // Each held-out image is counted once, and only one rank prints.
    assert_eq!(text.matches("of 355 images").count(), 1, "{text}");
    assert_eq!(text.matches("epoch   1").count(), 1, "{text}");
    for part in [
        "Held-out accuracy",
        "Wall time",
        "images/s, 2 ranks",
        "All-reduced",
        "Ops",
        "checksum",
    ] {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    let rows = rows(out.path());
    assert_eq!(rows.len(), 5);
    assert!(rows[4].held_out_accuracy.is_some());
    let png = std::fs::read(out.path().join("curves.png")).unwrap();
    assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
    assert!(
        out.path()
            .join("checkpoints/step-000000000005/model.bpk")
            .is_file()
    );
}

#[test]
fn two_ranks_see_what_one_rank_with_twice_the_batch_sees() {
    let losses = |ranks: &str, batch: &str| {
        let out = tempfile::tempdir().unwrap();
        let args = [
            "--ranks",
            ranks,
            "--batch-size",
            batch,
            "--max-steps",
            "20",
            "--quiet",
        ];
        succeed(small(out.path(), &args));
        rows(out.path())
            .iter()
            .map(|row| row.loss)
            .collect::<Vec<_>>()
    };
    let (one, two) = (losses("1", "32"), losses("2", "16"));
    assert_eq!((one.len(), two.len()), (20, 20));
    for (step, (one, two)) in one.iter().zip(&two).enumerate() {
        assert!(
            (one - two).abs() < 1e-4,
            "step {step}: {one} with one rank, {two} with two"
        );
    }
    assert!(one[19] < one[0], "{one:?}");
}

#[test]
fn without_sync_bn_two_ranks_differ_from_one() {
    let last = |ranks: &str, batch: &str| {
        let out = tempfile::tempdir().unwrap();
        let args = [
            "--ranks",
            ranks,
            "--batch-size",
            batch,
            "--max-steps",
            "3",
            "--quiet",
            "--no-sync-bn",
        ];
        succeed(small(out.path(), &args));
        rows(out.path())[2].loss
    };
    assert!((last("1", "16") - last("2", "8")).abs() > 1e-4);
}

#[test]
fn accumulated_batches_make_fewer_steps() {
    for precision in ["f32", "bf16"] {
        let losses = |batch: &str, accumulate: &str| {
            let out = tempfile::tempdir().unwrap();
            let args = [
                "--ranks",
                "2",
                "--batch-size",
                batch,
                "--accumulate",
                accumulate,
                "--epochs",
                "2",
                "--warmup-epochs",
                "0",
                "--quiet",
                "--precision",
                precision,
            ];
            succeed(small(out.path(), &args));
            rows(out.path())
                .iter()
                .map(|row| row.loss)
                .collect::<Vec<_>>()
        };
        // A step has 360 of the 1,442 images. In three batches, 120 are normalized at a time, so the losses differ slightly.
        let (three, one) = (losses("60", "3"), losses("180", "1"));
        assert_eq!((three.len(), one.len()), (8, 8), "{precision}");
        for (step, (three, one)) in three.iter().zip(&one).enumerate() {
            assert!(
                (three - one).abs() < 1e-3,
                "{precision}, step {step}: {three} with three batches, {one} with one"
            );
        }
    }
}

#[test]
fn it_joins_the_ranks_that_torchrun_starts() {
    let out = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
        .to_string();
    let rank = |rank: &str| {
        // --ranks only matters to the program's own launcher. Here there are two ranks, whatever it says.
        let mut command = small(
            out.path(),
            &["--ranks", "7", "--batch-size", "16", "--max-steps", "2"],
        );
        command
            .env("RANK", rank)
            .env("LOCAL_RANK", rank)
            .env("WORLD_SIZE", "2")
            .env("LOCAL_WORLD_SIZE", "2");
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let outputs = [rank("0"), rank("1")].map(|child| child.wait_with_output().unwrap());
    for output in &outputs {
        assert!(output.status.success(), "{}", stderr(output));
    }
    assert!(String::from_utf8_lossy(&outputs[0].stdout).contains("images/s, 2 ranks"));
    assert!(outputs[1].stdout.is_empty());
}

/// The process of rank `rank` that `launcher` started.
fn process_of(launcher: &Child, rank: usize) -> Option<i32> {
    let id = launcher.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
    children.split_whitespace().find_map(|child| {
        let environment = std::fs::read(format!("/proc/{child}/environ")).ok()?;
        let variable = format!("RANK={rank}");
        environment
            .split(|&byte| byte == 0)
            .any(|entry| entry == variable.as_bytes())
            .then(|| child.parse().ok())?
    })
}

/// Kills rank `victim` of two during a run. The other rank must report which one died, and the program must end.
fn kill_one(victim: usize, precision: &str) {
    let out = tempfile::tempdir().unwrap();
    let args = [
        "--ranks",
        "2",
        "--batch-size",
        "16",
        "--epochs",
        "1000",
        "--precision",
        precision,
    ];
    let mut launcher = small(out.path(), &args)
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let started = Instant::now();
    while rows(out.path()).len() < 3 {
        assert!(started.elapsed() < Duration::from_secs(60), "no steps");
        sleep(Duration::from_millis(20));
    }
    let process = process_of(&launcher, victim).expect("a rank of the launcher");
    let survivor = process_of(&launcher, 1 - victim).expect("the other rank");
    kill(Pid::from_raw(process), Signal::SIGKILL).unwrap();
    let status = wait(&mut launcher, Duration::from_secs(20));
    assert_eq!(status.code(), Some(1));
    let said = stderr(&launcher.wait_with_output().unwrap());
    let line = said
        .lines()
        .find(|line| line.contains(&format!("rank {}: ", 1 - victim)));
    let names = |line: &str| line.contains(&format!("rank {victim} died"));
    assert!(line.is_some_and(names), "{said}");
    assert!(said.contains("SIGKILL"), "{said}");
    let alive = Path::new("/proc").join(survivor.to_string());
    assert!(!alive.exists(), "the other rank lives on");
}

#[test]
fn a_killed_rank_ends_the_other_with_an_error_that_names_it() {
    kill_one(0, "f32");
    kill_one(1, "f32");
}

#[test]
fn a_killed_rank_ends_the_other_on_the_autocast_device_too() {
    kill_one(1, "bf16");
}
