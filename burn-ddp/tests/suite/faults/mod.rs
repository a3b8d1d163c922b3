//! Everything that can go wrong with a rank: the others must say which one it was, in time.

mod descriptors;
mod late;
mod leaving;
mod meeting;
mod panics;

use std::{
    iter,
    net::TcpListener,
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use crate::suite::ranks::{meeting_place, start};

#[test]
fn processes_reduce() {
    for world_size in [2, 3, 4] {
        let (_folder, url) = meeting_place();
        let expected: f32 = (0..world_size).map(|rank| rank as f32 + 0.5).sum();
        for rank in start("sum", world_size, &url, 60.0) {
            let output = rank.succeed(60);
            assert!(
                output.contains(&format!("RESULT ok {expected} {expected}")),
                "{output}"
            );
        }
    }
}

#[test]
fn a_killed_rank_ends_the_others_at_once() {
    let jobs = [
        ("loop", 2, 1),
        ("loop", 3, 0),
        ("loop", 4, 2),
        ("pending", 3, 2),
        ("pending", 2, 0),
    ];
    for (scenario, world_size, victim) in jobs {
        let (_folder, url) = meeting_place();
        let mut ranks = start(scenario, world_size, &url, 60.0);
        ranks[victim].wait_for_steps(3);
        ranks[victim].signal(Signal::SIGKILL);
        let start = Instant::now();
        for (index, rank) in ranks.into_iter().enumerate() {
            let output = rank.fail(20);
            if index != victim {
                let named = format!("rank {victim} died");
                assert!(output.contains(&named), "rank {index}: {output}");
            }
        }
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{:?}",
            start.elapsed()
        );
    }
}

#[test]
fn a_stopped_rank_is_named_within_the_timeout() {
    for (scenario, world_size, victim) in [("loop", 2, 0), ("loop", 4, 2), ("patient", 3, 1)] {
        let (_folder, url) = meeting_place();
        let mut ranks = start(scenario, world_size, &url, 3.0);
        ranks[victim].wait_for_steps(3);
        ranks[victim].signal(Signal::SIGSTOP);
        let start = Instant::now();
        let stopped = ranks.remove(victim);
        for rank in ranks {
            let output = rank.fail(20);
            assert!(
                output.contains(&format!("waiting for ranks [{victim}]")),
                "{output}"
            );
            assert!(output.contains("no sign of life"), "{output}");
        }
        assert!(
            start.elapsed() < Duration::from_secs(8),
            "{:?}",
            start.elapsed()
        );
        stopped.signal(Signal::SIGCONT);
        let output = stopped.fail(20);
        assert!(output.contains("RESULT error"), "it learns why: {output}");
    }
}

/// A port that no other call was given, from below those that Linux hands out by itself, so that nobody takes it
/// before the test does.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 20_000 + (std::process::id() % 50) as u16 * 200;
    let ports = iter::repeat_with(|| first + NEXT.fetch_add(1, Ordering::Relaxed) % 200);
    let mut ports = ports.take(200);
    ports
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .unwrap()
}
