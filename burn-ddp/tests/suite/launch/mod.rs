//! The launcher, in this process and as a command.

mod command;
mod ends;
mod machines;
mod restarts;

use std::{
    process::Output,
    thread,
    time::{Duration, Instant},
};

use burn_ddp::{
    DdpError, ProcessGroup, ReduceOp,
    launch::{self, LaunchOptions},
};

use crate::suite::ranks::{FOLDER, PLAY, SCENARIO, player};

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

#[test]
fn a_program_starts_itself_again_as_ranks() {
    let output = player("launch itself").output().unwrap();
    assert!(output.status.success());
    let printed = String::from_utf8(output.stdout).unwrap();
    // 0.5 and 1.5, on both.
    assert_eq!(printed.matches("RESULT ok 2 2").count(), 2, "{printed}");
}
