//! Tests on Flex what `gpu_steps` does: one process measures a small model, and another starts it, and starts it again if a way
//! fails.

use std::{
    env,
    io::{self, Write},
    process::{self, Command},
    time::Duration,
};

use benches::{
    Precision, Training,
    models::model_training,
    steps::{Bench, Event, Findings, Job, Report, Theirs, measure},
};
use burn::tensor::{Device, Tensor};

/// The environment variable with the ways that should fail, and how: a list of pairs of `Failure` and `Precision`, in JSON.
const FAILURES: &str = "GPU_STEPS_FAILURES";

#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
enum Failure {
    /// The process aborts in the steps of the way by itself.
    Aborts,
    /// The loss is NaN when ways are timed in turn.
    LearnsNothingInTurn,
    /// The first step never returns.
    Hangs,
}

/// Not a test, but the process that measures, when it is started for a job.
#[test]
fn child() {
    let Some(job) = Job::of_this_process() else {
        return;
    };
    let failures = env::var(FAILURES).unwrap_or("[]".into());
    let failures: Vec<(Failure, Precision)> = serde_json::from_str(&failures).unwrap();
    let mut begun = job.in_turn.clone();
    let init = |way| {
        // The first training of a way is the one by itself.
        let in_turn = begun.contains(&way);
        begun.push(way);
        let failure = failures.iter().find(|(_, failing)| *failing == way);
        let failure = failure.map(|(failure, _)| *failure);
        let mut model = model_training(&job.model, job.batch, way, Device::flex());
        let mut steps = 0;
        Training::new(move || {
            model.step();
            let loss = model.check().unwrap();
            steps += 1;
            let loss = match failure {
                Some(Failure::Aborts) if steps == 7 => process::abort(),
                Some(Failure::LearnsNothingInTurn) if steps > 6 && in_turn => f32::NAN,
                Some(Failure::Hangs) => loop {
                    std::thread::sleep(Duration::from_secs(1));
                },
                _ => loss,
            };
            Tensor::from_floats([loss], &Device::flex())
        })
    };
    let told = measure(&job, &(), init, |event| {
        // The test harness captures `print!`.
        let mut out = io::stdout().lock();
        writeln!(out, "\n{}", serde_json::to_string(&event)?)?;
        out.flush()
    });
    told.unwrap();
}

fn run(
    ways: &[Precision],
    failures: &[(Failure, Precision)],
    limit: Duration,
) -> (Bench, Findings) {
    let bench = Bench {
        model: "gpt_tiny".into(),
        batch: 1,
        ways: ways.to_vec(),
        rounds: 3,
    };
    let mut findings = Findings::default();
    let command = || {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["child", "--exact", "--nocapture"]);
        command.env(FAILURES, serde_json::to_string(failures).unwrap());
        command
    };
    bench.run(&mut findings, command, Some(limit)).unwrap();
    (bench, findings)
}

const LONG: Duration = Duration::from_secs(300);

#[test]
fn every_way_is_measured() {
    let (bench, findings) = run(&Precision::ALL, &[], LONG);
    assert_eq!(findings.failed, []);
    assert_eq!(findings.alone.len(), Precision::ALL.len());
    for way in Precision::ALL {
        assert_eq!(findings.rounds_of(way), 3, "{way}");
    }
    let theirs = Theirs::of(
        Command::new("echo").arg(r#"{"way": "TF32", "seconds": [1.0], "bytes": 1048576}"#),
        None,
    );
    let mut report = Report {
        bench: &bench,
        findings: &findings,
        theirs: None,
    };
    let ours = report.to_string();
    for way in Precision::ALL {
        assert!(ours.contains(&format!("| {way} | ")), "{ours}");
    }
    report.theirs = Some(&theirs);
    let rest = report.to_string();
    for line in [
        "| PyTorch TF32 | 1000.000 ms | 1 |",
        "| plain f32, of PyTorch's TF32 | 0.",
        "| autocast bf16: time, of plain f32's | ",
        "| autocast bf16: time, of bf16 by hand's | ",
        "| autocast fp8, delayed scaling: time, of autocast bf16's | ",
    ] {
        assert!(rest.contains(line), "{line} in {rest}");
    }
}

#[test]
fn a_way_that_fails_leaves_the_others() {
    use Precision::{AllBf16, Bf16, O0, Plain};
    let ways = [Plain, O0, AllBf16, Bf16];
    let failures = [
        (Failure::Aborts, O0),
        (Failure::LearnsNothingInTurn, AllBf16),
    ];
    let (bench, findings) = run(&ways, &failures, LONG);
    let failed: Vec<Precision> = findings.failed.iter().map(|(way, _)| *way).collect();
    assert_eq!(failed, [O0, AllBf16], "{findings:?}");
    assert!(findings.failed[1].1.contains("NaN"), "{findings:?}");
    // Results from before a failure stay.
    assert!(findings.alone(O0).is_none() && findings.alone(AllBf16).is_some());
    for way in [Plain, Bf16] {
        assert_eq!(findings.rounds_of(way), 3, "{way}");
    }
    let report = Report {
        bench: &bench,
        findings: &findings,
        theirs: None,
    };
    let report = report.to_string();
    assert!(
        report.contains("- autocast O0 failed: its process ended: "),
        "{report}"
    );
    assert!(
        report.contains("| all bf16 | ") && report.contains(" | by itself | "),
        "{report}"
    );
}

#[test]
fn ways_that_share_few_rounds_are_not_judged() {
    use Precision::{Bf16, Bf16ByHand, O0, Plain};
    let bench = Bench {
        model: "resnet50".into(),
        batch: 64,
        ways: vec![Plain, O0, Bf16, Bf16ByHand],
        rounds: 10,
    };
    let mut findings = Findings::default();
    for (way, seconds) in [(Plain, 1.0), (O0, 1.0), (Bf16, 0.4), (Bf16ByHand, 0.4)] {
        findings.hear(Event::Alone {
            way,
            seconds: vec![seconds; 3],
            bytes: (seconds * 1e9) as u64,
            polls: 1.0,
        });
    }
    let theirs = r#"{"way": "TF32", "seconds": [2.0, 2.0, 2.0], "bytes": 0}
{"way": "bf16 autocast", "seconds": [1.0, 1.0, 1.0], "bytes": 0}"#;
    let theirs = Theirs::of(Command::new("echo").arg(theirs), None);
    let report = |findings: &Findings| {
        let report = Report {
            bench: &bench,
            findings,
            theirs: Some(&theirs),
        };
        report.to_string()
    };
    let goal = "| autocast O0: time, of plain f32's | 1.000 |  | at most 1.020 |";
    let factor = "| autocast bf16: how many times as fast as plain f32, of PyTorch's over TF32 | 1.250 |  | at least 1.000 |";
    let memory = "| autocast bf16: peak memory, of plain f32's | 0.400 |  | at most 0.600 | met |";
    for outcome in [
        "not judged: each by itself",
        "not judged: 1 round",
        "not judged: 2 rounds",
        "met",
    ] {
        let printed = report(&findings);
        for line in [goal, factor] {
            assert!(
                printed.contains(&format!("{line} {outcome} |")),
                "{printed}"
            );
        }
        // The memory is always measured for each way by itself.
        assert!(printed.contains(memory), "{printed}");
        findings.hear(Event::Round(vec![
            (Plain, 1.0),
            (O0, 1.0),
            (Bf16, 0.4),
            (Bf16ByHand, 0.4),
        ]));
    }
}

/// In each layout by itself: the ways in TF32 take different times too.
#[test]
fn the_gain_is_compared_with_the_largest_of_pytorch() {
    use Precision::{Bf16, Plain};
    let bench = Bench {
        model: "resnet50".into(),
        batch: 64,
        ways: vec![Plain, Bf16],
        rounds: 3,
    };
    let mut findings = Findings::default();
    for _ in 0..3 {
        findings.hear(Event::Round(vec![(Plain, 3.0), (Bf16, 1.0)]));
    }
    let theirs = r#"{"way": "TF32", "seconds": [4.0, 4.0, 4.0], "bytes": 0}
{"way": "bf16 autocast", "seconds": [2.0, 2.0, 2.0], "bytes": 0}
{"way": "TF32, channels last", "seconds": [3.0, 3.0, 3.0], "bytes": 0}
{"way": "bf16 autocast, channels last", "seconds": [1.0, 1.0, 1.0], "bytes": 0}"#;
    let theirs = Theirs::of(Command::new("echo").arg(theirs), None);
    let report = Report {
        bench: &bench,
        findings: &findings,
        theirs: Some(&theirs),
    };
    let printed = report.to_string();
    for line in [
        "| PyTorch's TF32, of its bf16 autocast | 2.000 |  |",
        "| PyTorch's TF32, channels last, of its bf16 autocast, channels last | 3.000 |  |",
        "| autocast bf16: how many times as fast as plain f32, of PyTorch's over TF32, channels last | 1.000 |  | at least 1.000 | met |",
    ] {
        assert!(printed.contains(line), "{line} in {printed}");
    }
}

#[test]
fn time_ends_what_does_not_end_itself() {
    let ways = [Precision::AllBf16, Precision::Plain];
    let failures = [(Failure::Hangs, Precision::AllBf16)];
    let (_, findings) = run(&ways, &failures, Duration::from_secs(10));
    let expected = (Precision::AllBf16, "the time was up".to_owned());
    assert_eq!(findings.failed, [expected]);
    assert_eq!(findings.left_out, [Precision::Plain]);
}

#[test]
fn without_time_for_all_the_rounds_are_of_two_ways() {
    use Precision::{AllBf16, Bf16, O0, Plain};
    let bench = Bench {
        model: "gpt_tiny".into(),
        batch: 1,
        ways: vec![Plain, Bf16, O0, AllBf16],
        rounds: 3,
    };
    let job = Job {
        model: bench.model.clone(),
        batch: bench.batch,
        alone: bench.ways.clone(),
        in_turn: vec![],
        rounds: bench.rounds,
        seconds: 0.0,
    };
    let init = |way| model_training(&job.model, job.batch, way, Device::flex());
    let mut findings = Findings::default();
    let end = measure(&job, &(), init, |event| {
        findings.hear(event);
        Ok(())
    });
    end.unwrap();
    let rounds = [Plain, Bf16, O0, AllBf16].map(|way| findings.rounds_of(way));
    assert_eq!(rounds, [1, 1, 0, 0]);
    assert_eq!(findings.left_out, [O0, AllBf16]);

    let mut report = Report {
        bench: &bench,
        findings: &findings,
        theirs: None,
    };
    let ours = report.to_string();
    for way in [O0, AllBf16] {
        let line = format!("- {way} was left out: there was no time for it\n");
        assert!(ours.contains(&line), "{ours}");
        assert!(!ours.contains(&format!("| {way} | ")), "{ours}");
    }
    let theirs = Theirs::default();
    report.theirs = Some(&theirs);
    let goals = report.to_string();
    assert!(
        goals.contains("autocast bf16: time") && !goals.contains("autocast O0"),
        "{goals}"
    );
}
