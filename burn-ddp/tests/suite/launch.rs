//! The launcher, in this process and as a command.

use std::{
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use burn_ddp::{
    DdpError, ProcessGroup, ReduceOp,
    launch::{self, LaunchOptions},
};
use nix::sys::signal::Signal;

use crate::suite::{
    faults::free_port,
    ranks::{FOLDER, PLAY, Rank, SCENARIO, player},
};

pub(crate) fn play(scenario: &str) -> LaunchOptions {
    LaunchOptions::new()
        .arguments(PLAY)
        .variable(SCENARIO, scenario)
        .grace(Duration::from_secs(2))
}

pub(crate) fn spawn(ranks: usize, options: LaunchOptions) -> Result<(), DdpError> {
    launch::spawn(std::env::current_exe().unwrap(), ranks, options)
}

/// What a process of this binary does that starts or finds ranks itself; whether it is one.
pub(crate) fn played(scenario: &str) -> bool {
    let program = std::env::current_exe().unwrap();
    let options = || LaunchOptions::new().arguments(PLAY);
    let ranks = || options().variable(SCENARIO, "loop");
    match scenario {
        "launch" => launch::spawn(program, 2, ranks()).unwrap_err(),
        "launch on threads" => {
            let ranks = options().variable(SCENARIO, "loop, begun on a thread");
            launch::spawn(program, 2, ranks).unwrap_err()
        }
        "launch itself" => {
            let options = options().variable(SCENARIO, "sum").prefix_output(true);
            launch::spawn_self(2, options).unwrap();
            return true;
        }
        "launch with little time to stop" => {
            let script = "trap '' TERM; echo STEP; while :; do sleep 0.05; done";
            let options = LaunchOptions::new()
                .arguments(["-c", script])
                .stop_grace(Duration::from_millis(300));
            launch::spawn("sh", 2, options).unwrap_err()
        }
        "launch with restarts" => launch::spawn(program, 2, ranks().max_restarts(1)).unwrap_err(),
        "launch scripts" => {
            // A shell that starts the program and waits for it.
            let script = ["-c", "\"$0\" \"$@\"; exit $?"].map(Into::into);
            let arguments = script.into_iter().chain([program.into_os_string()]);
            let arguments = arguments.chain(PLAY.map(Into::into));
            let ranks = ranks().arguments(arguments).prefix_output(true);
            launch::spawn("sh", 2, ranks).unwrap_err()
        }
        "launch and stay" => {
            // Twice: the second hears signals again, which end a rank that knows nothing of them.
            for _ in 0..2 {
                let kill = ["-c", "kill -USR1 $PPID; sleep 60"];
                let options = LaunchOptions::new().arguments(kill);
                launch::spawn("sh", 1, options).unwrap_err();
            }
            println!("STEP");
            thread::sleep(Duration::from_secs(60));
            return true;
        }
        "init or single" => {
            let group = ProcessGroup::init_or_single().unwrap();
            println!("RANK {} OF {}", group.rank(), group.world_size());
            return true;
        }
        "run" => {
            let body = |group: ProcessGroup| {
                let mut ranks = [group.rank() as u32];
                group.all_reduce(&mut ranks, ReduceOp::Sum)?;
                println!("RANK {} SUM {}", group.rank(), ranks[0]);
                match group.rank() == 2 && std::env::var_os(FOLDER).is_some() {
                    true => Err(DdpError::InvalidArgument("on purpose".into())),
                    false => Ok(()),
                }
            };
            let result = launch::run(3, options().prefix_output(true), body);
            let Err(error) = result else {
                return true;
            };
            println!("ENDED {error}");
            std::process::exit(1)
        }
        _ => return crate::suite::first_failure::played(scenario),
    };
    true
}

#[test]
fn a_program_runs_a_closure_on_ranks() {
    let text = |output: &Output| String::from_utf8(output.stdout.clone()).unwrap();
    let output = player("run").output().unwrap();
    assert!(output.status.success());
    let said = text(&output);
    for rank in 0..3 {
        let sum = format!("RANK {rank} SUM 3");
        assert!(line(&said, rank, &sum).is_some(), "{said}");
    }
    // A body that fails is a rank that fails.
    let output = player("run").env(FOLDER, "").output().unwrap();
    assert!(!output.status.success());
    let text = text(&output);
    assert!(
        line(&text, 2, "ENDED invalid argument: on purpose").is_some(),
        "{text}"
    );
    assert!(text.contains("ENDED rank 2 failed"), "{text}");
}

/// The line of a rank that says something.
pub(crate) fn line<'a>(text: &'a str, rank: usize, what: &str) -> Option<&'a str> {
    let prefix = format!("[{rank}] ");
    text.lines()
        .find(|line| line.starts_with(&prefix) && line.contains(what))
}

/// The rank that ends a job, and its exit code.
#[track_caller]
pub(crate) fn failed(ended: Result<(), DdpError>) -> (usize, Option<i32>) {
    match ended.unwrap_err() {
        DdpError::RankFailed { rank, code, .. } => (rank, code),
        error => panic!("{error}"),
    }
}

#[test]
fn ranks_find_each_other() {
    for ranks in [1, 3] {
        spawn(ranks, play("sum")).unwrap();
    }
}

#[test]
fn ranks_find_each_other_at_a_master() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let busy = spawn(2, play("sum").master("127.0.0.1", port));
    assert_eq!(failed(busy).0, 0);
    drop(listener);
    spawn(2, play("sum").master("127.0.0.1", port)).unwrap();
}

#[test]
fn the_rank_that_failed_first_is_named() {
    let start = Instant::now();
    // Rank 1 exits while rank 0 would sleep for a minute.
    assert_eq!(failed(spawn(2, play("exit 7"))), (1, Some(7)));
    assert!(start.elapsed() < Duration::from_secs(30));
    let error = spawn(3, play("die")).unwrap_err();
    assert!(
        matches!(&error, DdpError::RankFailed { rank: 2, code: None, status }
        if status.contains("SIGKILL")),
        "{error}"
    );
}

/// What the attempts left in their folder.
fn attempts(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("attempt")).collect();
    names.sort();
    names
}

#[test]
fn failed_ranks_start_again_from_their_checkpoint() {
    let run = |restarts: usize| {
        let folder = tempfile::tempdir().unwrap();
        let options = play("count")
            .variable(FOLDER, folder.path())
            .max_restarts(restarts);
        (spawn(2, options), attempts(folder.path()))
    };
    let (result, attempts) = run(2);
    result.unwrap();
    let all = ["attempt-0-from-0", "attempt-1-from-2", "attempt-2-from-4"];
    assert_eq!(attempts, all);
    // One restart is not enough: the last attempt's failure is what is reported.
    let (result, attempts) = run(1);
    assert_eq!(failed(result), (1, Some(9)));
    assert_eq!(attempts, all[..2]);
}

#[test]
fn a_signal_is_no_failure_to_start_again_from() {
    let (launcher, pids) = launcher("launch with restarts");
    launcher.signal(Signal::SIGTERM);
    wait_for_end(&pids);
    let (_, output) = launcher.finish(Duration::from_secs(20));
    assert!(
        !output.contains("PID"),
        "no rank was started again: {output}"
    );
}

#[test]
fn mistakes_are_refused() {
    assert!(matches!(
        spawn(0, play("sum")),
        Err(DdpError::InvalidArgument(_))
    ));
    let several = play("sum").nodes(2, 0);
    assert!(matches!(
        spawn(1, several),
        Err(DdpError::InvalidArgument(_))
    ));
    let missing = launch::spawn("/no/such/program", 1, LaunchOptions::new());
    assert!(missing.unwrap_err().to_string().contains("starting rank 0"));
}

/// A launcher in a process of its own, and the ids of its ranks.
fn launcher(scenario: &str) -> (Rank, Vec<i32>) {
    let mut launcher = Rank(player(scenario).spawn().unwrap());
    let mut lines = BufReader::new(launcher.0.stdout.as_mut().unwrap()).lines();
    let mut pids = Vec::new();
    while pids.len() < 2 {
        let line = lines.next().unwrap().unwrap();
        if let Some((_, pid)) = line.split_once("PID ") {
            pids.push(pid.parse().unwrap());
        }
    }
    (launcher, pids)
}

fn is_running(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    status.is_ok_and(|status| !status.contains(") Z "))
}

fn wait_for_end(pids: &[i32]) {
    let start = Instant::now();
    while pids.iter().any(|pid| is_running(*pid)) {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "a rank outlived its launcher"
        );
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn ranks_end_with_their_launcher() {
    for scenario in ["launch", "launch on threads"] {
        for signal in [Signal::SIGKILL, Signal::SIGTERM] {
            let (launcher, pids) = launcher(scenario);
            launcher.signal(signal);
            wait_for_end(&pids);
        }
    }
}

#[test]
fn what_scripts_start_ends_with_the_launcher() {
    let (killed, pids) = launcher("launch scripts");
    killed.signal(Signal::SIGKILL);
    wait_for_end(&pids);
    let (asked, pids) = launcher("launch scripts");
    asked.signal(Signal::SIGTERM);
    wait_for_end(&pids);
    asked.finish(Duration::from_secs(20));
}

#[test]
fn what_ranks_leave_running_is_ended() {
    let folder = tempfile::tempdir().unwrap();
    let script = |script: &str| {
        let options = LaunchOptions::new()
            .arguments(["-c", script])
            .variable("FOLDER", folder.path())
            .prefix_output(true)
            .grace(Duration::from_millis(200));
        let start = Instant::now();
        launch::spawn("sh", 2, options).unwrap();
        assert!(start.elapsed() < Duration::from_secs(15));
    };
    // It knows nothing of being asked to end.
    script("trap '' TERM; sleep 100 & echo $! > $FOLDER/pid-$RANK");
    let pid = |rank: usize| {
        let text = std::fs::read_to_string(folder.path().join(format!("pid-{rank}"))).unwrap();
        text.trim().parse().unwrap()
    };
    wait_for_end(&[pid(0), pid(1)]);
    // Out of reach, it holds a pipe that the launcher reads.
    script("setsid sleep 20 & exit 0");
}

/// The command, whose ranks play a scenario.
fn command(arguments: &[&str], scenario: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-ddp"));
    command.arg("run").args(arguments).arg("--");
    command.arg(std::env::current_exe().unwrap()).args(PLAY);
    command.env(SCENARIO, scenario);
    command
}

#[test]
fn a_program_starts_itself_again_as_ranks() {
    let output = player("launch itself").output().unwrap();
    assert!(output.status.success());
    let printed = String::from_utf8(output.stdout).unwrap();
    // 0.5 and 1.5, on both.
    assert_eq!(printed.matches("RESULT ok 2 2").count(), 2, "{printed}");
}

#[test]
fn ranks_that_do_not_stop_when_asked_are_killed_after_a_while() {
    let mut launcher = Rank(player("launch with little time to stop").spawn().unwrap());
    launcher.wait_for_steps(2);
    let start = Instant::now();
    launcher.signal(Signal::SIGTERM);
    launcher.succeed(20);
    assert!(start.elapsed() >= Duration::from_millis(300));
}

#[test]
fn a_name_stands_for_the_number_of_ranks() {
    let run = |n: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-ddp"));
        let script = "echo rank $RANK of $WORLD_SIZE";
        command.args([
            "run",
            "--no-prefix",
            "--nproc-per-node",
            n,
            "--",
            "sh",
            "-c",
            script,
        ]);
        command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap()
    };
    let cores = std::thread::available_parallelism().unwrap().get();
    for name in ["cpu", "auto"] {
        let output = run(name);
        assert!(output.status.success(), "{output:?}");
        let printed = String::from_utf8(output.stdout).unwrap();
        let mut lines: Vec<&str> = printed.lines().collect();
        lines.sort_unstable();
        let mut expected: Vec<String> = (0..cores)
            .map(|rank| format!("rank {rank} of {cores}"))
            .collect();
        expected.sort_unstable();
        assert_eq!(lines, expected, "{name}");
    }
    let output = run("gpu");
    assert!(!output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("hidden by CUDA_VISIBLE_DEVICES"), "{error}");
}

/// What `burn-ddp run` prints with these arguments.
fn printed(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-ddp"));
    let output = command.args(["run", "--no-prefix"]).args(arguments);
    let output = output.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn arguments_are_as_of_torchrun() {
    // All that follows the program is its own, whether or not `--` is before it.
    let script = "echo $WORLD_SIZE $0 $*";
    let own = ["sh", "-c", script, "zero", "--", "--grace", "-n"];
    for dashes in [&[][..], &["--"]] {
        let arguments = [&["--nproc_per_node=1"], dashes, &own].concat();
        assert_eq!(printed(&arguments), "1 zero -- --grace -n\n");
    }
    let script = ["sh", "-c", "echo $MASTER_ADDR:$MASTER_PORT"];
    for (arguments, master) in [
        (&["--master", "127.0.0.1:2345"][..], "127.0.0.1:2345"),
        (&["--master-port", "2345"], "127.0.0.1:2345"),
        (
            &["--master_addr=10.0.0.1", "--master_port=2345"],
            "10.0.0.1:2345",
        ),
        (&["--master-addr", "10.0.0.1"], "10.0.0.1:29500"),
    ] {
        assert_eq!(
            printed(&[arguments, &script].concat()),
            format!("{master}\n")
        );
    }
}

/// Launchers on this machine that play two machines.
fn two_machines(ranks: usize, arguments: &[&str], scenario: &str, timeout: &str) -> [Command; 2] {
    let master = format!("127.0.0.1:{}", free_port());
    ["0", "1"].map(|node| {
        let ranks = ranks.to_string();
        let own = [
            "-n",
            &ranks,
            "--nnodes",
            "2",
            "--node-rank",
            node,
            "--master",
            &master,
            "--grace",
            "2",
        ];
        let mut command = command(&[&own, arguments].concat(), scenario);
        command
            .env("BURN_DDP_TIMEOUT", timeout)
            .env("BURN_DDP_SECRET", "of both machines")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    })
}

/// What two machines print.
fn machines(ranks: usize, arguments: &[&str], scenario: &str, folder: &Path) -> Vec<Output> {
    let launchers = two_machines(ranks, arguments, scenario, "60")
        .map(|mut command| command.env(FOLDER, folder).spawn().unwrap());
    let outputs = launchers.into_iter().map(|it| it.wait_with_output());
    outputs.map(Result::unwrap).collect()
}

#[test]
fn machines_meet_at_a_master() {
    let folder = tempfile::tempdir().unwrap();
    for (node, output) in machines(2, &[], "sum", folder.path()).iter().enumerate() {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        for rank in [2 * node, 2 * node + 1] {
            // 0.5 + 1.5 + 2.5 + 3.5
            assert!(line(&text, rank, "RESULT ok 8 8").is_some(), "{text}");
        }
    }
    let outputs = machines(1, &["--max-restarts", "2"], "count", folder.path());
    for output in outputs {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
    }
    let all = ["attempt-0-from-0", "attempt-1-from-2", "attempt-2-from-4"];
    assert_eq!(attempts(folder.path()), all);
}

/// Ctrl-C on one of two machines: the other starts again once, as it does when a rank of that one has failed.
#[test]
fn a_machine_that_waits_in_vain_does_not_start_again() {
    let check = |interrupted: usize| {
        let mut launchers = two_machines(1, &["--max-restarts", "2"], "loop", "10")
            .map(|mut command| Rank(command.spawn().unwrap()));
        let printed = launchers[interrupted].wait_for_steps(1);
        assert!(printed.contains("STEP"), "{printed}");
        launchers[interrupted].signal(Signal::SIGINT);
        let mut errors = launchers[1 - interrupted].0.stderr.take().unwrap();
        for launcher in launchers {
            launcher.fail(100);
        }
        let mut said = String::new();
        errors.read_to_string(&mut said).unwrap();
        assert!(said.contains("starting all ranks again (1 of 2)"), "{said}");
        assert!(!said.contains("(2 of 2)"), "{said}");
        assert!(said.contains("ranks did not appear in time"), "{said}");
    };
    // The machine with rank 0 waits for the other to come, the other for rank 0 to listen.
    std::thread::scope(|scope| {
        scope.spawn(|| check(0));
        check(1);
    });
}

/// As when a job's output goes to a program that ends, or to a terminal that is closed.
#[test]
fn ranks_start_again_although_nobody_reads_what_is_said() {
    let run = |mut command: Command| {
        let (_, nobody) = std::io::pipe().unwrap();
        let status = command.stdout(Stdio::null()).stderr(nobody).status();
        status.unwrap().code()
    };
    let folder = tempfile::tempdir().unwrap();
    let mut count = command(&["-n", "2", "--max-restarts", "2"], "count");
    count.env(FOLDER, folder.path());
    assert_eq!(run(count), Some(0));
    assert_eq!(attempts(folder.path()).len(), 3);
    let fails = command(&["-n", "2", "--grace", "0.5"], "exit 7");
    assert_eq!(run(fails), Some(7));
}

#[test]
fn predictions_of_no_sense_are_refused() {
    let simulate = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-ddp"));
        let arguments = command.arg("simulate").args(arguments);
        let output = arguments.output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let usual = ["--compute-ms", "100", "--gradient-mb", "100"];
    assert_eq!(simulate(&usual).0, Some(0));
    for (wrong, why) in [
        (
            ["--compute-ms", "1e300", "--gradient-mb", "1"],
            "--compute-ms",
        ),
        (["--compute-ms", "1", "--gradient-mb", "1e8"], "--bucket-mb"),
    ] {
        let (code, text) = simulate(&wrong);
        assert!(code == Some(2) && text.contains(why), "{code:?} {text}");
    }
}

#[test]
fn the_command_prefixes_output_and_returns_the_ranks_code() {
    let run = |scenario: &str, arguments: &[&str]| command(arguments, scenario).output().unwrap();
    let output = run("sum", &["-n", "2"]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for rank in 0..2 {
        assert!(line(&text, rank, "RESULT ok").is_some(), "{text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let mut count = command(&["-n", "2", "--max-restarts", "2"], "count");
    let count = count.env(FOLDER, folder.path()).output().unwrap();
    assert!(count.status.success());
    assert_eq!(attempts(folder.path()).len(), 3);
    let said = String::from_utf8_lossy(&count.stderr);
    for why in [
        "rank 1 failed: it was killed by SIGKILL; starting all ranks again (1 of 2)",
        "rank 1 failed: it ended with exit code 9; starting all ranks again (2 of 2)",
    ] {
        assert!(said.contains(why), "{said}");
    }
    let output = run("exit 7", &["-n", "2", "--grace", "0.5", "--no-prefix"]);
    assert_eq!(output.status.code(), Some(7));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains("rank 1 failed: it ended with exit code 7"),
        "{text}"
    );
    for wrong in [
        &["--nnodes", "2", "--node-rank", "2"][..],
        &["--master", "nowhere"],
        &["--master", "host:1", "--master-port", "2"],
        &["--nnodes", "2", "--master-port", "2"],
        &["--nnodes", "2"],
        &["-n", "x"],
    ] {
        assert_eq!(run("sum", wrong).status.code(), Some(2), "{wrong:?}");
    }
}
