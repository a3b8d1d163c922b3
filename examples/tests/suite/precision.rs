//! Tests of the number formats.

use crate::suite::{rows, small, succeed};

/// The losses of four steps on two ranks, and the printed table.
fn train(precision: &str) -> (Vec<f64>, String) {
    let out = tempfile::tempdir().unwrap();
    let args = [
        "--ranks",
        "2",
        "--batch-size",
        "16",
        "--max-steps",
        "4",
        "--quiet",
    ];
    let table = succeed(small(
        out.path(),
        &[&args[..], &["--precision", precision]].concat(),
    ));
    (rows(out.path()).iter().map(|row| row.loss).collect(), table)
}

#[test]
fn low_precision_stays_close_to_f32() {
    let (expected, table) = train("f32");
    assert!(table.contains("all in f32"), "{table}");
    let mut seen = vec![expected.clone()];
    // bf16 has 8 significant bits, and fp16 has 11. fp8 is only used in the last layer, and bf16 elsewhere.
    for (precision, format, tolerance) in [
        ("bf16", "bf16", 2e-2),
        ("fp16", "fp16", 4e-3),
        ("fp8", "bf16", 5e-2),
    ] {
        let (losses, table) = train(precision);
        assert_eq!(losses.len(), 4);
        for (loss, expected) in losses.iter().zip(&expected) {
            assert!(
                (loss - expected).abs() < tolerance,
                "{precision}: {losses:?}, in f32 {expected:?}"
            );
        }
        assert!(!seen.contains(&losses), "{precision} is none of the others");
        seen.push(losses);
        let ops = table.lines().find(|line| line.starts_with("Ops")).unwrap();
        assert!(
            ops.contains(&format!("in {format}")) && ops.contains("in f32"),
            "{ops}"
        );
        assert_eq!(ops.contains("in fp8"), precision == "fp8", "{ops}");
    }
}

#[test]
fn a_resumed_fp16_run_goes_on_with_its_loss_scale() {
    let run = |out: &std::path::Path, more: &[&str]| {
        let args = [
            "--ranks",
            "1",
            "--batch-size",
            "176",
            "--epochs",
            "1",
            "--precision",
            "fp16",
            "--quiet",
        ];
        succeed(small(out, &[&args[..], more].concat()));
        rows(out).iter().map(|row| row.loss).collect::<Vec<_>>()
    };
    let out = tempfile::tempdir().unwrap();
    run(out.path(), &["--max-steps", "2"]);
    let state = std::fs::read(out.path().join("checkpoints/step-000000000002/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    // The initial scale is PyTorch's, and is halved at each overflow.
    let scale = state["scaler"]["scale"].as_f64().unwrap();
    assert!(
        scale > 1.0 && scale <= 65536.0 && scale.log2().fract() == 0.0,
        "{state}"
    );
    assert_eq!(state["scaler"]["steps"], 2);

    let losses = run(out.path(), &["--resume"]);
    let whole = tempfile::tempdir().unwrap();
    let expected = run(whole.path(), &[]);
    assert_eq!(losses.len(), 8);
    for (loss, expected) in losses.iter().zip(&expected) {
        assert!(
            (loss - expected).abs() < 1e-3,
            "{losses:?}, uninterrupted {expected:?}"
        );
    }
}
