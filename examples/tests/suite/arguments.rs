//! Tests of errors before a run starts: one clear line, and exit code 2.

use std::fs::File;
use std::net::TcpListener;
use std::process::Command;

use crate::suite::{plain, small, stderr, succeed};

/// The one line that a run prints which cannot be set up.
fn refused(mut command: Command) -> String {
    let output = command.output().expect("the program starts");
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(
        output.stdout.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    stderr
}

fn assert_names(line: &str, parts: &[&str]) {
    for part in parts {
        assert!(line.contains(part), "no `{part}` in: {line}");
    }
}

#[test]
fn help_names_every_option_and_the_defaults() {
    let help = succeed(plain(&["--help"]));
    let options = "--data --ranks --precision --device --epochs --batch-size --accumulate --lr --seed --width \
                   --depth --checkpoint-dir --resume --no-sync-bn --quiet --max-steps --timeout --out";
    for option in options.split_whitespace() {
        assert_names(&help, &[option]);
    }
    assert_names(
        &help,
        &[
            "f32",
            "bf16",
            "fp16",
            "fp8",
            "[default: bf16]",
            "flex",
            "cuda",
            "wgpu",
            "cpu",
            "torchrun",
        ],
    );
    assert!(
        help.lines().all(|line| line.chars().count() <= 100),
        "{help}"
    );
}

#[test]
fn a_wrong_path_is_named() {
    let out = tempfile::tempdir().unwrap();
    let line = refused(small(out.path(), &["--data", "/nowhere/at/all"]));
    assert_names(&line, &["/nowhere/at/all", "data_batch_1.bin"]);
}

#[test]
fn a_truncated_file_is_named_with_its_sizes() {
    let data = tempfile::tempdir().unwrap();
    for name in ["data_batch_1.bin", "data_batch_2.bin"] {
        File::create(data.path().join(name))
            .unwrap()
            .set_len(30_730_000)
            .unwrap();
    }
    File::options()
        .write(true)
        .open(data.path().join("data_batch_2.bin"))
        .unwrap()
        .set_len(1_000_000)
        .unwrap();
    let out = tempfile::tempdir().unwrap();
    let line = refused(small(
        out.path(),
        &["--data", data.path().to_str().unwrap()],
    ));
    assert_names(&line, &["data_batch_2.bin", "1000000", "30730000"]);
}

#[test]
fn an_unknown_device_gets_the_list() {
    let out = tempfile::tempdir().unwrap();
    assert_names(
        &refused(small(out.path(), &["--device", "tpu"])),
        &["tpu", "flex", "cuda", "wgpu", "cpu"],
    );
}

#[test]
fn a_device_that_is_not_compiled_in_gets_its_feature() {
    let out = tempfile::tempdir().unwrap();
    let compiled = [
        ("cuda", cfg!(feature = "cuda")),
        ("wgpu", cfg!(feature = "wgpu")),
        ("cpu", cfg!(feature = "cpu")),
    ];
    for (device, _) in compiled.iter().filter(|(_, compiled)| !compiled) {
        let line = refused(small(out.path(), &["--device", device]));
        assert_names(&line, &[device, &format!("--features {device}")]);
    }
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let out = tempfile::tempdir().unwrap();
    for (option, value) in [
        ("--depth", "18"),
        ("--batch-size", "0"),
        ("--lr", "fast"),
        ("--ranks", "0"),
    ] {
        let line = refused({
            let mut command = plain(&[option, value]);
            command.arg("--out").arg(out.path());
            command
        });
        assert_names(&line, &[option, value, "expected"]);
    }
    assert_names(
        &refused(small(out.path(), &["--batch-size", "5000"])),
        &["--batch-size", "1442"],
    );
}

#[test]
fn numbers_whose_product_is_too_large_do_not_wrap() {
    let out = tempfile::tempdir().unwrap();
    let quarter = (1_u64 << 62).to_string();
    for [option, count] in [["--ranks", "4"], ["--accumulate", "8"]] {
        let line = refused(small(
            out.path(),
            &["--batch-size", &quarter, option, count],
        ));
        assert_names(&line, &["--batch-size", "1442"]);
    }
    let most = u64::MAX.to_string();
    for option in ["--epochs", "--warmup-epochs"] {
        succeed(small(
            out.path(),
            &["--ranks", "1", "--max-steps", "1", option, &most],
        ));
    }
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let out = tempfile::tempdir().unwrap();
    assert_names(
        &refused(small(out.path(), &["--ranks", "2", "--port", &port])),
        &[&port, "in use"],
    );
}

#[test]
fn an_output_folder_that_cannot_be_made_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let line = refused(small(&file.path().join("out"), &["--ranks", "1"]));
    assert_names(&line, &[file.path().to_str().unwrap()]);
}

#[test]
fn nothing_to_resume_and_another_run_to_resume_are_told_apart() {
    let out = tempfile::tempdir().unwrap();
    let one_rank = [
        "--ranks",
        "1",
        "--batch-size",
        "16",
        "--max-steps",
        "1",
        "--quiet",
    ];
    let with = |more: &[&str]| small(out.path(), &[&one_rank, more].concat());
    assert_names(
        &refused(with(&["--resume"])),
        &["nothing to resume", out.path().to_str().unwrap()],
    );
    succeed(with(&[]));
    let line = refused(with(&["--resume", "--lr", "0.5"]));
    assert_names(&line, &["step-000000000001", "lr 0.05", "0.5"]);
}
