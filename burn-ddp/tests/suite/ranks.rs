//! Ranks for tests: threads over TCP, threads in one process, and real processes.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use burn_ddp::{GroupBuilder, LocalGroup, ProcessGroup};
use nix::sys::signal::Signal;

/// The variable that tells a process of this binary which scenario to play.
pub(crate) const SCENARIO: &str = "BURN_DDP_TEST_SCENARIO";

/// The variable that tells it which folder to use.
pub(crate) const FOLDER: &str = "BURN_DDP_TEST_FOLDER";

/// The arguments that make this binary run nothing but [`play`](super::scenarios::play).
pub(crate) const PLAY: [&str; 4] = [
    "suite::scenarios::play",
    "--exact",
    "--nocapture",
    "--test-threads=1",
];

/// Runs `body` on `world_size` threads that talk over TCP, and returns what each returned.
pub(crate) fn over_tcp<R: Send>(
    world_size: usize,
    sockets: usize,
    body: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let builder = |_| {
        ProcessGroup::builder()
            .timeout(Duration::from_secs(60))
            .sockets(sockets)
    };
    connected(world_size, builder, body)
}

/// Runs `body` on threads that talk over TCP and wait for each other for a second.
pub(crate) fn impatiently<R: Send>(
    world_size: usize,
    body: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let builder = |_| {
        ProcessGroup::builder()
            .timeout(Duration::from_secs(1))
            .connect_timeout(Duration::from_secs(30))
    };
    connected(world_size, builder, body)
}

/// Runs `body` on threads that talk over TCP, each by a builder of its own.
pub(crate) fn connected<R: Send>(
    world_size: usize,
    builder: impl Fn(usize) -> GroupBuilder + Sync,
    body: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let (_folder, url) = meeting_place();
    // Nobody begins before all have met: what ends a job would end a rank's meeting too.
    let groups: Vec<ProcessGroup> = thread::scope(|scope| {
        let connect = |rank| {
            let (url, builder) = (&url, &builder);
            scope.spawn(move || builder(rank).connect(url, rank, world_size).unwrap())
        };
        let ranks: Vec<_> = (0..world_size).map(connect).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    together(groups, body)
}

/// Runs `body` on `world_size` threads that talk within the process.
pub(crate) fn locally<R: Send>(
    world_size: usize,
    body: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    together(LocalGroup::new(world_size), body)
}

/// Runs `body` on a thread for each rank.
pub(crate) fn together<R: Send>(
    groups: Vec<ProcessGroup>,
    body: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || body(group)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A rank in a process of its own.
pub(crate) struct Rank(pub(crate) Child);

impl Rank {
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = nix::unistd::Pid::from_raw(self.0.id() as i32);
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    /// Reads its output until it has made some steps, or has ended: what it has printed.
    pub(crate) fn wait_for_steps(&mut self, steps: usize) -> String {
        // A byte at a time: what comes after belongs to `finish`.
        let mut lines = BufReader::with_capacity(1, self.0.stdout.as_mut().unwrap());
        let mut printed = String::new();
        while made(&printed) < steps && lines.read_line(&mut printed).unwrap() > 0 {}
        printed
    }

    /// Waits for its end and returns what it printed.
    pub(crate) fn finish(mut self, limit: Duration) -> (bool, String) {
        let mut stdout = self.0.stdout.take().unwrap();
        // Meanwhile, since a full pipe would hold it up.
        let output = thread::spawn(move || {
            let mut output = String::new();
            std::io::Read::read_to_string(&mut stdout, &mut output).unwrap();
            output
        });
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > limit {
                self.0.kill().unwrap();
                self.0.wait().unwrap();
                panic!("a rank did not end within {limit:?}");
            }
            thread::sleep(Duration::from_millis(5));
        };
        (status.success(), output.join().unwrap())
    }

    /// Waits for its end, which must be a success, and returns what it printed.
    #[track_caller]
    pub(crate) fn succeed(self, seconds: u64) -> String {
        let (success, output) = self.finish(Duration::from_secs(seconds));
        assert!(success, "{output}");
        output
    }

    /// Waits for its end, which must be a failure, and returns what it printed.
    #[track_caller]
    pub(crate) fn fail(self, seconds: u64) -> String {
        let (success, output) = self.finish(Duration::from_secs(seconds));
        assert!(!success, "{output}");
        output
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The steps in what a rank has printed.
pub(crate) fn made(printed: &str) -> usize {
    printed.lines().filter(|line| line.contains("STEP")).count()
}

/// Starts `world_size` processes of this binary that play a scenario.
pub(crate) fn start(scenario: &str, world_size: usize, url: &str, timeout: f64) -> Vec<Rank> {
    (0..world_size)
        .map(|rank| start_one(scenario, rank, world_size, url, timeout))
        .collect()
}

pub(crate) fn start_one(
    scenario: &str,
    rank: usize,
    world_size: usize,
    url: &str,
    timeout: f64,
) -> Rank {
    spawn(
        &mut player(scenario),
        scenario,
        rank,
        world_size,
        url,
        timeout,
    )
}

/// This binary, to play a scenario.
pub(crate) fn player(scenario: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(PLAY).env(SCENARIO, scenario);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

/// What the ranks of a job in processes of their own print, and whether they have succeeded.
pub(crate) fn results(scenario: &str, world_size: usize) -> Vec<(bool, String)> {
    let (_folder, url) = meeting_place();
    start(scenario, world_size, &url, 60.0)
        .into_iter()
        .map(|rank| rank.finish(Duration::from_secs(100)))
        .collect()
}

/// What they print, where all succeed.
#[track_caller]
pub(crate) fn all_succeed(scenario: &str, world_size: usize) -> Vec<String> {
    let all = results(scenario, world_size).into_iter();
    all.map(|(success, output)| {
        // A binary that knows no such test succeeds too.
        let played = output.contains("RESULT ok");
        assert!(success && played, "{scenario}: {output}");
        output
    })
    .collect()
}

/// What they print, where all fail.
#[track_caller]
pub(crate) fn all_fail(scenario: &str, world_size: usize) -> Vec<String> {
    let all = results(scenario, world_size).into_iter();
    all.inspect(|(success, output)| assert!(!success, "{scenario}: {output}"))
        .map(|(_, output)| output)
        .collect()
}

/// What a scenario has returned, in what its rank has printed.
pub(crate) fn result(output: &str) -> &str {
    let (_, text) = output.split_once("RESULT ok ").unwrap();
    text.lines().next().unwrap()
}

/// Starts a rank by a command that comes down to running this binary's [`PLAY`].
pub(crate) fn spawn(
    command: &mut Command,
    scenario: &str,
    rank: usize,
    world_size: usize,
    url: &str,
    timeout: f64,
) -> Rank {
    let command = as_rank(command, scenario, rank, world_size, url, timeout);
    let command = command.stdout(Stdio::piped()).stderr(Stdio::null());
    Rank(command.spawn().unwrap())
}

/// Tells a command which rank it is to play.
pub(crate) fn as_rank<'a>(
    command: &'a mut Command,
    scenario: &str,
    rank: usize,
    world_size: usize,
    url: &str,
    timeout: f64,
) -> &'a mut Command {
    command
        .env(SCENARIO, scenario)
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world_size.to_string())
        .env("BURN_DDP_RENDEZVOUS", url)
        .env("BURN_DDP_TIMEOUT", timeout.to_string())
        .env(
            "BURN_DDP_BACKEND",
            if scenario.starts_with("nccl") {
                "nccl"
            } else {
                "auto"
            },
        )
        .env("NCCL_MULTI_RANK_GPU_ENABLE", "1")
}

/// A fresh rendezvous file.
pub(crate) fn meeting_place() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().join("master").display());
    (folder, url)
}
