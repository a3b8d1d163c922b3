//! What `results.json` and `results.md` say.

use super::machine::Machine;

const TABLE: &str = "cat <<'T'
What does it cost? (20 rounds)

| | median | ratio | middle half of the ratios |
|---|---|---|---|
| this | 1.500ms | 1.000 |  |
| that | 3.000ms | 2.000 | 1.900 to 2.100 |

Which kernels does it launch?

| kernel | plain f32 | autocast |
|---|---|---|
| Matmul<f32> | 3, 1.20ms | 0, 0.00ns |

- autocast failed: out of memory
T";

const GOALS: &str = "cat <<'T'
Which goals are met? a step

| | ratio | middle half | goal | outcome |
|---|---|---|---|---|
| memory | 0.500 |  | at most 0.600 | met |
| time | 1.500 | 1.400 to 1.600 | at most 1.020 | not judged: each by itself |
T";

#[test]
fn what_programs_did_is_summed_up() {
    let passing = "echo 'test result: ok. 3 passed; 0 failed; 0 ignored'
        echo 'skipped: no GPU' >&2
        echo 'SKIPPED: no NVRTC' >&2";
    let programs = [
        ("test-fp8", passing),
        (
            "test-amp",
            "echo 'test result: FAILED. 1 passed; 2 failed; 0 ignored'; exit 101",
        ),
        ("test-slow", "sleep 60"),
        (
            "example-cifar_resnet_ddp",
            "echo 'Held-out accuracy  99.15 % (352 of 355 images)'",
        ),
        ("bench-gpu_fp8", TABLE),
        ("bench-gpu_nccl", GOALS),
    ];
    let Some(machine) = Machine::new(&programs) else {
        return;
    };
    let output = machine.run(&[]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("failed: test-amp test-slow"), "{printed}");

    let results = machine.results();
    let program = |name: &str| machine.program(name);
    let fp8 = program("test-fp8");
    assert_eq!((&fp8["passed"], &fp8["skipped"]), (&3.into(), &2.into()));
    assert_eq!(program("test-amp")["failed"], 2);
    assert_eq!(program("test-slow")["status"], 124);
    assert_eq!(program("example-bf16")["accuracy"][0], 99.15);
    assert_eq!(results["device"], "NVIDIA None, 1.2.3");
    let row = &results["benches"][1];
    assert_eq!(
        (&row["way"], &row["median"]),
        (&"that".into(), &"3.000ms".into())
    );
    assert_eq!(row["question"], "What does it cost? (20 rounds)");
    assert_eq!(row["middle half of the ratios"], "1.900 to 2.100");
    let row = &results["benches"][2];
    assert_eq!(
        (&row["way"], &row["plain f32"], &row["autocast"]),
        (
            &"Matmul<f32>".into(),
            &"3, 1.20ms".into(),
            &"0, 0.00ns".into()
        )
    );
    assert_eq!(row["question"], "Which kernels does it launch?");

    let row = &results["benches"][4];
    assert_eq!(row["outcome"], "not judged: each by itself");
    let goals = &program("bench-gpu_nccl")["goals"];
    assert_eq!(
        (&goals["met"], &goals["not judged"]),
        (&1.into(), &1.into())
    );

    let note = &results["notes"][0];
    assert_eq!(note["question"], "Which kernels does it launch?");
    assert_eq!(note["note"], "autocast failed: out of memory");

    let results = machine.read("benches/RESULTS.md");
    assert!(
        results.starts_with("# Results\n") && results.contains("0123456789"),
        "{results}"
    );
    for line in [
        "| test-fp8 | 3 passed, 0 failed, 2 said that they were skipped |",
        "| test-slow | took too long |",
        "| that | 3.000ms | 2.000 | 1.900 to 2.100 |",
        "| bench-gpu_nccl | goals: 1 met, 1 not judged |",
    ] {
        assert!(results.contains(line), "{results}");
    }
    assert!(machine.root.path().join(".gpu/out/logs.tar.gz").exists());
}

/// They end well, but that says nothing.
#[test]
fn a_model_that_learned_nothing_and_tests_that_are_none_are_told() {
    let learned = "echo 'Held-out accuracy  10.00 % (35 of 355 images)'";
    let none = "echo 'test result: ok. 0 passed; 0 failed; 9 filtered out'";
    for (program, body, said) in [
        (
            "example-cifar_resnet_ddp",
            learned,
            "example-f32: 10.0 %, under 97 %",
        ),
        ("test-fp8", none, "test-fp8: no test ran"),
    ] {
        let Some(machine) = Machine::new(&[(program, body)]) else {
            return;
        };
        let output = machine.run(&[]);
        let printed = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{printed}");
        assert!(printed.contains(said), "{printed}");
        let results = machine.read("benches/RESULTS.md");
        let (name, why) = said.split_once(": ").unwrap();
        assert!(
            results.contains(&format!("| {name} | {why} |")),
            "{results}"
        );
    }
}

#[test]
fn parts_and_their_arguments_are_chosen() {
    let programs = [
        (
            "test-fp8",
            "echo \"test result: ok. $# passed; 0 failed\"; [ \"$7$8$9\" = coverageroutinesslow ]",
        ),
        (
            "bench-gpu_steps",
            "[ \"$2\" = vit_b_16/32 ] && [ \"$NCCL_MULTI_RANK_GPU_ENABLE\" = 1 ]",
        ),
        ("bench-gpu_fp8", "exit 3"),
    ];
    let Some(machine) = Machine::new(&programs) else {
        return;
    };
    let output = machine.run(&["test-fp8:routines:slow", "bench-gpu_steps:vit_b_16/32"]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}");
    assert_eq!(machine.results()["programs"].as_array().unwrap().len(), 2);

    let output = machine.run(&[".gpu", "everything"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no such part: everything"));
}

#[test]
fn what_was_ended_is_counted_as_far_as_it_came() {
    let ended = "printf 'running 4 tests\\ntest a::one ... ok\\ntest a::two - should panic ... ok\\ntest b ... FAILED\\ntest c ... '
        exec sleep 60";
    let Some(machine) = Machine::new(&[("test-fp8", ended)]) else {
        return;
    };
    machine.run(&[]);
    let fp8 = machine.program("test-fp8");
    assert_eq!((&fp8["passed"], &fp8["failed"]), (&2.into(), &1.into()));
    assert_eq!(fp8["running"].to_string(), r#"["c"]"#);
    let line = "| test-fp8 | 2 passed, 1 failed, ended in c, took too long |";
    let results = machine.read("benches/RESULTS.md");
    assert!(results.contains(line), "{results}");
}
