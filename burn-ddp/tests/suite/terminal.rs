//! Ranks of a launcher that runs in a terminal, and ranks that stand still.

use std::{
    io::Read,
    os::fd::AsFd,
    process::{Command, Stdio},
    time::Duration,
};

use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::suite::{launchers::is_installed, ranks::Rank};

/// The command in a terminal of its own, with a script as ranks.
fn in_a_terminal(arguments: &str, script: &str) -> Option<Rank> {
    if !is_installed("script") {
        eprintln!("skipped: no script(1) here");
        return None;
    }
    let program = env!("CARGO_BIN_EXE_burn-ddp");
    let command = format!("{program} run --grace 0.1 {arguments} -- sh -c \"$SCRIPT\"");
    let child = Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env("SCRIPT", script)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    Some(Rank(child.unwrap()))
}

/// What comes until `end` does.
fn read_until(from: &mut (impl Read + AsFd), end: &str) -> String {
    let mut text = Vec::new();
    let mut byte = [0];
    while !text.ends_with(end.as_bytes()) {
        let mut wanted = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
        let ready = poll(&mut wanted, 20_000u16).unwrap();
        let read = if ready > 0 {
            from.read(&mut byte).unwrap()
        } else {
            0
        };
        assert!(
            read > 0,
            "no more came: {:?}",
            String::from_utf8_lossy(&text)
        );
        text.push(byte[0]);
    }
    String::from_utf8(text).unwrap()
}

/// As burn-train's dashboard does, which begins by `tcsetattr`.
#[test]
fn no_rank_takes_over_the_terminal() {
    let script = "if [ -t 1 ]; then stty -echo </dev/tty; fi; echo LINE $RANK";
    for ranks in [1, 2] {
        let Some(terminal) = in_a_terminal(&format!("--no-prefix -n {ranks}"), script) else {
            return;
        };
        let output = terminal.succeed(20);
        let mut lines: Vec<&str> = output.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["LINE 0", "LINE 1"][..ranks]);
    }
}

#[test]
fn progress_bars_move_in_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    for (at, (arguments, bar)) in [("--no-prefix", "50 %\r"), ("", "[0] 50 %\r")]
        .into_iter()
        .enumerate()
    {
        let seen = folder.path().join(at.to_string());
        let wait = format!("while ! [ -e {} ]; do sleep 0.01; done", seen.display());
        let script = format!("printf '50 %%\\r'; {wait}; echo 'at its end'");
        let Some(mut terminal) = in_a_terminal(arguments, &script) else {
            return;
        };
        let shown = read_until(terminal.0.stdout.as_mut().unwrap(), "\r");
        assert_eq!(shown, bar);
        std::fs::write(seen, "").unwrap();
        let rest = terminal.succeed(20);
        assert!(rest.contains("at its end"), "{rest}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_the_terminal_stops_is_named() {
    let script = "echo launcher $PPID; sleep 0.1; stty -echo </dev/tty";
    let Some(mut terminal) = in_a_terminal("-n 1 --no-prefix", script) else {
        return;
    };
    let output = terminal.0.stdout.as_mut().unwrap();
    let launcher = read_until(output, "\n");
    let said = read_until(output, "\n");
    assert!(said.contains("rank 0 was stopped by SIGTTOU"), "{said}");
    assert!(said.contains("terminal"), "{said}");
    // The job ends as the user was told to end it. It would outlive the terminal where SIGHUP is ignored.
    let launcher = launcher.trim().strip_prefix("launcher ").unwrap();
    kill(Pid::from_raw(launcher.parse().unwrap()), Signal::SIGTERM).unwrap();
    let output = terminal.fail(20);
    assert!(output.contains("rank 0 failed"), "{output}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_stopped_rank_is_named_once() {
    let script = "[ $RANK = 0 ] || kill -STOP $$; [ $RANK = 0 ] || kill -STOP $$; echo $RANK";
    let child = Command::new(env!("CARGO_BIN_EXE_burn-ddp"))
        .args(["run", "-n", "2", "--", "sh", "-c", script])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut launcher = Rank(child.unwrap());
    let mut errors = launcher.0.stderr.take().unwrap();
    let said = read_until(&mut errors, "\n");
    assert!(said.contains("rank 1 was stopped by SIGSTOP"), "{said}");
    let (_, pid) = said.split_once("kill -CONT ").expect("what to do");
    let pid = pid.split('`').next().unwrap().parse().unwrap();
    // The second time, nothing is said of it.
    let start = std::time::Instant::now();
    while launcher.0.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(20));
        let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
        std::thread::sleep(Duration::from_millis(100));
    }
    let output = launcher.succeed(20);
    assert!(output.contains("[1] 1"), "{output}");
    let mut more = String::new();
    errors.read_to_string(&mut more).unwrap();
    assert_eq!(more, "");
}

/// The state of a process, such as T for stopped.
#[cfg(target_os = "linux")]
fn state(pid: i32) -> char {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, after_name) = text.rsplit_once(") ").unwrap();
    after_name.chars().next().unwrap()
}

/// Ctrl-Z reaches the launcher alone, and stops its ranks with it.
#[cfg(target_os = "linux")]
#[test]
fn a_job_can_be_suspended_and_go_on() {
    // A rank ends if nobody ends it. It is one process: a shell that has just forked a command when that is stopped would wait for it
    // in another state.
    let script = "echo PID $$; exec sleep 60";
    let child = Command::new(env!("CARGO_BIN_EXE_burn-ddp"))
        .args(["run", "-n", "2", "--no-prefix", "--", "sh", "-c", script])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut launcher = Rank(child.unwrap());
    let output = launcher.0.stdout.as_mut().unwrap();
    let pids = [(); 2].map(|()| {
        let line = read_until(output, "\n");
        line.trim().strip_prefix("PID ").unwrap().parse().unwrap()
    });
    let all = [launcher.0.id() as i32, pids[0], pids[1]];
    let wait_until = |stopped: bool| {
        let start = std::time::Instant::now();
        while all.iter().any(|pid| (state(*pid) == 'T') != stopped) {
            let states = all.map(state);
            assert!(start.elapsed() < Duration::from_secs(20), "{states:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    for _ in 0..2 {
        launcher.signal(Signal::SIGTSTP);
        wait_until(true);
        launcher.signal(Signal::SIGCONT);
        wait_until(false);
    }
    launcher.signal(Signal::SIGTERM);
    let mut errors = launcher.0.stderr.take().unwrap();
    let _ = launcher.fail(20);
    let mut said = String::new();
    errors.read_to_string(&mut said).unwrap();
    // That it was stopped is no surprise to who stopped it.
    assert!(!said.contains("was stopped"), "{said}");
}
