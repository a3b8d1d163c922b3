//! Time limits, interruptions, and what is left of programs.

use std::{
    fs,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use super::machine::{Machine, PASSES, write_program};

#[test]
fn a_time_for_all_is_the_limit_of_each() {
    let programs = [
        // The first two print how many seconds they get.
        ("bench-gpu_steps", "echo \"- $BENCH_SECONDS s\""),
        ("bench-gpu_fp8", "echo \"- $BENCH_SECONDS s\""),
        ("bench-gpu_kernels", "sleep 60"),
    ];
    let Some(machine) = Machine::new(&programs) else {
        return;
    };
    let output = machine.run_with(&[("TIME", "2000"), ("LIMIT", "2")], &[]);
    assert_eq!(output.status.code(), Some(1));
    let ran = machine.results()["programs"].clone();
    let ran: Vec<&str> = ran
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["name"].as_str().unwrap())
        .collect();
    // The most important programs come first.
    assert_eq!(
        ran,
        ["bench-gpu_steps", "bench-gpu_fp8", "bench-gpu_kernels"]
    );
    assert_eq!(machine.program("bench-gpu_kernels")["status"], 124);

    let seconds = |variables: &[(&str, &str)]| {
        let parts = ["bench-gpu_steps", "bench-gpu_fp8"];
        assert!(machine.run_with(variables, &parts).status.success());
        let notes = machine.results()["notes"].clone();
        let notes = notes.as_array().unwrap().clone().into_iter();
        let seconds = notes.map(|note| {
            let note = note["note"].as_str().unwrap();
            note.trim_end_matches(" s").parse().unwrap()
        });
        seconds.collect::<Vec<u32>>()
    };
    let [steps, fp8] = seconds(&[("TIME", "2000")])[..] else {
        panic!("two benches")
    };
    // The first has half of the time, the second what is left.
    assert!(
        (900..=1000).contains(&steps) && (1800..2000).contains(&fp8),
        "{steps}, {fp8}"
    );
    assert_eq!(seconds(&[]), [2385, 285]);
    let output = machine.run_with(&[("TIME", "20")], &["bench-gpu_steps"]);
    assert_eq!(output.status.code(), Some(2));
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        printed.contains("bench-gpu_steps: no time is left"),
        "{printed}"
    );
}

#[test]
fn what_a_program_leaves_is_ended() {
    // Like a rank, the process leads a session of its own. It ignores all signals but SIGKILL.
    let leaves = "setsid sh -c \"trap '' TERM; echo \\$\\$; while :; do sleep 1; done\" >left &
        while [ ! -s left ]; do sleep 0.1; done
        echo 'test result: ok. 1 passed; 0 failed'";
    let Some(machine) = Machine::new(&[("test-ddp", leaves)]) else {
        return;
    };
    let output = machine.run_with(&[("LIMIT", "60")], &[]);
    assert!(output.status.success());
    let process = machine.read("left").trim().to_owned();
    let state = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The process is gone, or a zombie.
    assert!(state.is_empty() || state.contains(") Z "), "{state}");
}

#[test]
fn every_part_has_its_time() {
    let says = |line: &str| format!("echo \"{line} $BENCH_SECONDS\" >>seconds; {PASSES}");
    let (test, bench) = (says("test"), says("bench"));
    let programs = [
        ("test-amp", test.as_str()),
        ("test-fp8", PASSES),
        ("bench-gpu_fp8", bench.as_str()),
    ];
    let Some(machine) = Machine::new(&programs) else {
        return;
    };
    let sanitizer = machine.root.path().join("bin/compute-sanitizer");
    write_program(&sanitizer, &says("sanitizer"));
    assert!(machine.run_with(&[("TIME", "2015")], &[]).status.success());
    let told = machine.read("seconds");
    let told: Vec<(&str, u32)> = told
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(part, seconds)| (part, seconds.parse().unwrap()))
        .collect();
    let parts: Vec<&str> = told.iter().map(|(part, _)| *part).collect();
    assert_eq!(
        parts,
        ["test", "bench", "sanitizer", "sanitizer", "sanitizer"]
    );
    // Of 2000 s, the tests get at most two fifths (half of that if they do not run in parallel), then the bench two thirds, and
    // the three sanitizer runs share the rest. Each gets 15 s less, and less the time that has passed until then.
    for ((part, seconds), most) in told.iter().zip([800, 1333, 666, 1000, 2000]) {
        let least = if *part == "test" { most / 2 } else { most };
        assert!((least - 60..most).contains(seconds), "{told:?}");
    }
}

#[test]
fn an_interrupt_ends_everything() {
    let waits = "setsid sleep 60 & echo $! >left; echo $$ >own; sleep 60; echo >>left";
    let next = "echo >>left";
    let Some(machine) = Machine::new(&[("bench-gpu_steps", waits), ("bench-gpu_fp8", next)]) else {
        return;
    };
    let mut script = machine.script(&[], &[]);
    // A process group of its own, like a terminal's foreground. The programs that `timeout` starts are not in it.
    let mut script = script
        .process_group(0)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let own = machine.root.path().join("own");
    while fs::read_to_string(&own).unwrap_or_default().is_empty() {
        thread::sleep(Duration::from_millis(100));
        assert!(script.try_wait().unwrap().is_none(), "it ended by itself");
    }
    let group = format!("-{}", script.id());
    let sent = Command::new("kill")
        .args(["-s", "TERM", "--", &group])
        .status();
    assert!(sent.unwrap().success());
    assert_eq!(script.wait().unwrap().code(), Some(143));
    for process in [machine.read("left"), machine.read("own")] {
        let state = fs::read_to_string(format!("/proc/{}/stat", process.trim()));
        let state = state.unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "{state}");
    }
    assert!(!machine.root.path().join("cubecl.toml").exists());
}

/// One hangs, one fails, and one crashes.
#[test]
fn a_test_ends_no_other() {
    let tests = "case \"$*\" in
        *--list*) printf 'a::one: test\nb: test\nc: test\nd: test\nA: benchmark\n\n4 tests, 1 benchmark\n'; exit ;;
        *'--exact b '*) sleep 60 ;;
        *'--exact c '*) echo 'test c ... FAILED'; echo 'test result: FAILED. 0 passed; 1 failed'; exit 101 ;;
        *'--exact d '*) kill -s SEGV $$ ;;
        esac
        echo \"$*\" >passed; echo 'test a::one ... ok'; echo 'test result: ok. 1 passed; 0 failed'";
    let Some(machine) = Machine::new(&[("test-fp8", tests)]) else {
        return;
    };
    let limits = [("LIMIT", "30"), ("TEST_SECONDS", "1")];
    let output = machine.run_with(&limits, &["test-fp8:a:b:c:d"]);
    assert_eq!(output.status.code(), Some(1));
    let fp8 = machine.program("test-fp8");
    assert_eq!((&fp8["passed"], &fp8["failed"]), (&1.into(), &3.into()));
    assert_eq!(fp8["status"], 101);
    let given = machine.read("passed");
    assert_eq!(
        given.trim(),
        "--exact a::one --test-threads 2 --show-output"
    );
}
