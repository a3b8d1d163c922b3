//! Runs the built example as a user does, for a few steps.

mod program;

use program::program;
use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    let output = Command::new(program("transformer_autocast"))
        .args(args)
        .output();
    output.expect("the program starts")
}

/// The table's row of a precision, as numbers.
fn row(table: &str, precision: &str) -> Vec<f64> {
    let words = |line: &str| line.split_whitespace().next() == Some(precision);
    let row = table.lines().find(|line| words(line));
    let row = row.unwrap_or_else(|| panic!("no {precision} in:\n{table}"));
    let numbers = row.split_whitespace().skip(1);
    numbers
        .map(|number| number.parse().expect("a number"))
        .collect()
}

#[test]
fn every_precision_begins_with_the_same_weights_and_batches() {
    let small = "--seeds 2 --max-steps 4 --batch-size 16 --width 16 --layers 1 --quiet";
    let output = run(&small.split(' ').collect::<Vec<_>>());
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{table}{output:?}");
    // The columns are two seeds, their mean, the loss, skipped steps, and seconds.
    let exact = row(&table, "f32");
    assert_eq!(exact.len(), 6, "{table}");
    assert_eq!(
        exact[2],
        ((exact[0] + exact[1]) * 50.0).round() / 100.0,
        "{table}"
    );
    let (loss, skipped) = (3, 4);
    assert_eq!(exact[skipped], 0.0);
    // The loss of an untrained classifier with ten classes is ln 10.
    assert!((exact[loss] - 10f64.ln()).abs() < 0.5, "{table}");
    // bf16 has 8 significant bits, fp16 has 11, fp8 has 4.
    let tolerances = [
        ("bf16", 2e-2),
        ("fp16", 4e-3),
        ("fp8", 2e-2),
        ("fp8-delayed", 2e-2),
    ];
    for (precision, tolerance) in tolerances {
        let found = row(&table, precision)[loss];
        assert!((found - exact[loss]).abs() < tolerance, "{table}");
    }
    let [bf16, fp8, delayed] = ["bf16", "fp8", "fp8-delayed"].map(|name| row(&table, name)[loss]);
    assert!(bf16 != fp8 && bf16 != delayed, "{table}");
}

#[test]
fn options_that_make_no_sense_are_named() {
    for (option, value) in [
        ("--width", "6"),
        ("--batch-size", "9999"),
        ("--seeds", "0"),
        ("--lr", "nan"),
        ("--lr", "inf"),
        ("--lr", "-1"),
    ] {
        // If such a value were accepted, the run would be short.
        let output = run(&[&format!("{option}={value}"), "--max-steps=1"]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains(option) && stderr.contains(value),
            "{stderr}"
        );
    }
}
