//! Everything that can go wrong with a rank: the others must say which one it was, in time.

use std::{
    io::{Read, Write},
    iter,
    net::{TcpListener, TcpStream},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

use burn::{
    nn::BatchNormConfig,
    tensor::{Device, Tensor},
};
use burn_ddp::{CallKind, DdpError, ProcessGroup, ReduceOp, SyncBatchNorm};
use nix::sys::signal::Signal;

use crate::suite::ranks::{impatiently, locally, meeting_place, over_tcp, start, start_one};

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
fn a_late_rank_is_named_before_the_limit_ends_the_job() {
    let (_folder, url) = meeting_place();
    // It is 5 s late, and a fifth of the limit is 3.
    let ranks = start("late", 2, &url, 15.0);
    let outputs: Vec<String> = ranks.into_iter().map(|rank| rank.succeed(60)).collect();
    let warnings = |output: &str| -> Vec<String> {
        let lines = output.lines().filter(|line| line.contains("LOG WARN"));
        lines.map(String::from).collect()
    };
    let [warning] = &warnings(&outputs[0])[..] else {
        panic!("{}", outputs[0]);
    };
    for said in [
        "barrier",
        "ranks [1]",
        "of 15s",
        "not in this call yet",
        "BURN_DDP_TIMEOUT",
    ] {
        assert!(warning.contains(said), "{warning}");
    }
    assert_eq!(warnings(&outputs[1]), [""; 0]);
}

/// As a served device does that has one.
#[test]
fn an_amax_reducer_that_is_never_dropped_is_no_death() {
    let (_folder, url) = meeting_place();
    for rank in start("amaxes kept", 2, &url, 30.0) {
        let output = rank.succeed(60);
        assert!(output.contains("RESULT ok"), "{output}");
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

#[test]
fn a_rank_that_leaves_early_is_named() {
    let (_folder, url) = meeting_place();
    let results: Vec<_> = start("leave", 3, &url, 30.0)
        .into_iter()
        .map(|rank| rank.finish(Duration::from_secs(20)))
        .collect();
    assert!(results[1].0);
    for index in [0, 2] {
        let output = &results[index].1;
        assert!(
            output.contains("rank 1 left the group after 0 calls, but barrier #0"),
            "{output}"
        );
    }
}

/// To the others it is as dead as one that was killed, and they say what else it may be.
#[test]
fn a_rank_that_exits_with_a_handle_counts_as_dead_and_the_error_says_why() {
    let (_folder, url) = meeting_place();
    let ranks = start("static", 2, &url, 30.0);
    let results: Vec<_> = ranks
        .into_iter()
        .map(|rank| rank.finish(Duration::from_secs(20)))
        .collect();
    let output = &results[0].1;
    assert!(output.contains("rank 1 died"), "{output}");
    assert!(
        output.contains("`process::exit`, or a handle in a `static`"),
        "{output}"
    );
}

/// As after loops of unequal lengths over a communicator, beside which the job goes on.
#[test]
fn a_rank_that_drops_a_communicator_has_left_it_and_is_not_dead() {
    let body = |group: ProcessGroup| {
        let copy = group.duplicate().unwrap();
        let members = [2, 1, 0];
        let some = group.subgroup(&members).unwrap().unwrap();
        let calls = if group.rank() == 1 { 2 } else { 9 };
        let mut sums = (0..calls).map(|_| some.all_reduce(&mut [1f32; 10], ReduceOp::Sum));
        let ended = sums.find_map(Result::err);
        drop(some);
        // The other ranks tell the one that is alive what has become of the job.
        let error = ended.unwrap_or_else(|| copy.barrier().unwrap_err());
        assert_eq!(group.barrier().unwrap_err().to_string(), error.to_string());
        error
    };
    for error in [over_tcp(3, 2, body), locally(3, body)].concat() {
        let DdpError::RankLeft { rank, calls, call } = error else {
            panic!("{error}");
        };
        assert_eq!((rank, calls, call.sequence), (1, 2, 2));
        assert_eq!(call.kind, CallKind::AllReduce);
    }
}

#[test]
fn a_communicator_may_be_dropped_while_others_are_still_in_their_last_call() {
    let body = |group: ProcessGroup| {
        for round in 0..30 {
            let copy = group.duplicate().unwrap();
            if round % group.world_size() == group.rank() {
                thread::sleep(Duration::from_millis(3));
            }
            let mut sum = vec![1f32; 1 + 1000 * round];
            copy.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            drop(copy);
            assert!(sum.iter().all(|it| *it == 3.0));
        }
        group.barrier().unwrap();
    };
    over_tcp(3, 1, body);
    locally(3, body);
}

#[test]
fn where_descriptors_run_out_the_limit_is_named() {
    // The one that listens, the one that calls.
    for scenario in ["few descriptors 0", "few descriptors 1"] {
        let (_folder, url) = meeting_place();
        for rank in start(scenario, 2, &url, 60.0) {
            let output = rank.fail(40);
            assert!(output.contains("ulimit -n"), "{scenario}: {output}");
        }
    }
}

#[test]
fn more_descriptors_are_taken_where_the_system_allows_it() {
    let (_folder, url) = meeting_place();
    for rank in start("a low limit of descriptors", 2, &url, 60.0) {
        let output = rank.succeed(60);
        assert!(output.contains("RESULT ok 2"), "{output}");
    }
}

#[test]
fn a_panicking_rank_is_named() {
    let (_folder, url) = meeting_place();
    let results: Vec<_> = start("panic", 2, &url, 30.0)
        .into_iter()
        .map(|rank| rank.finish(Duration::from_secs(20)))
        .collect();
    assert!(
        results[0].1.contains("rank 1 aborted: it panicked"),
        "{}",
        results[0].1
    );
}

/// A call that is under way keeps the communicator, but it is not the program that does.
#[test]
fn a_rank_that_panics_while_a_call_is_under_way_is_named() {
    let body = |group: ProcessGroup| {
        if group.rank() == 1 {
            let panicking = catch_unwind(AssertUnwindSafe(move || {
                let _pending = group.all_reduce_async(vec![1f32; 10], ReduceOp::Sum);
                panic!("on purpose");
            }));
            return panicking.err().map(|_| String::new());
        }
        thread::sleep(Duration::from_millis(300));
        let reduced = group.all_reduce(&mut [1f32; 10], ReduceOp::Sum);
        let told = reduced.and_then(|()| group.barrier()).unwrap_err();
        Some(told.to_string())
    };
    for told in [over_tcp(2, 1, body), locally(2, body)] {
        assert_eq!(told[0].as_deref(), Some("rank 1 aborted: it panicked"));
    }
}

/// Nor is what forward keeps for backward.
#[test]
fn a_rank_that_panics_before_backward_is_named() {
    let body = |group: ProcessGroup| {
        let device = Device::flex().autodiff();
        let norm = SyncBatchNorm::new(&BatchNormConfig::new(2).init(&device), &group);
        let output = norm.forward(Tensor::<2>::ones([4, 2], &device));
        let told = match group.rank() {
            1 => {
                let panicking = catch_unwind(AssertUnwindSafe(move || {
                    let _both = (norm, group);
                    panic!("on purpose");
                }));
                panicking.err().map(|_| String::new())
            }
            _ => Some(group.barrier().unwrap_err().to_string()),
        };
        drop(output);
        told
    };
    let told = impatiently(2, body);
    assert_eq!(told[0].as_deref(), Some("rank 1 aborted: it panicked"));
}

#[test]
fn a_late_rank_is_told_from_a_dead_one() {
    let body = |group: ProcessGroup| {
        if group.rank() == 1 {
            thread::sleep(Duration::from_millis(2500));
        }
        group.barrier().unwrap_err()
    };
    for error in impatiently(3, body) {
        let DdpError::Timeout {
            ranks, call, why, ..
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!((ranks.as_slice(), call.kind), (&[1][..], CallKind::Barrier));
        assert!(why.contains("not in this call yet"), "{why}");
        assert!(why.contains("`ProcessGroup::with_timeout`"), "{why}");
    }
}

/// As where a rank that only sends is a call ahead of the others.
#[test]
fn a_rank_that_waits_for_a_late_one_is_not_blamed_alone() {
    let body = |group: ProcessGroup| {
        let mut data = [1f32];
        if group.rank() == 0 {
            thread::sleep(Duration::from_millis(2500));
        }
        // Rank 1 waits for rank 0 here, and rank 2 for rank 1 in the next call.
        let reduced = group.reduce(&mut data, ReduceOp::Sum, 1);
        let limit = Duration::from_secs(if group.rank() == 2 { 1 } else { 60 });
        let limited = group.with_timeout(limit);
        let copied = reduced.and_then(|()| limited.broadcast(&mut data, 1));
        copied.unwrap_err()
    };
    for error in [over_tcp(3, 1, body), locally(3, body)].concat() {
        let DdpError::Timeout { ranks, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(ranks, &[0, 1], "{error}");
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

#[test]
fn a_busy_port_is_a_setup_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let error = ProcessGroup::connect(&format!("tcp://{address}"), 0, 2).unwrap_err();
    assert!(matches!(error, DdpError::PortInUse { address: busy } if busy == address));
    assert!(error.is_setup());
}

#[test]
fn missing_ranks_are_named_to_those_who_came() {
    let url = format!("tcp://127.0.0.1:{}", free_port());
    let results: Vec<DdpError> = thread::scope(|scope| {
        let ranks: Vec<_> = [0, 2]
            .map(|rank| {
                let url = &url;
                scope.spawn(move || {
                    let builder = ProcessGroup::builder().timeout(Duration::from_secs(1));
                    builder.connect(url, rank, 4).unwrap_err()
                })
            })
            .into_iter()
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for error in results {
        assert!(error.is_setup());
        let DdpError::MissingRanks { missing, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(missing, &[1, 3]);
    }
}

#[test]
fn without_a_master_the_address_is_named() {
    let url = format!("tcp://127.0.0.1:{}", free_port());
    let start = Instant::now();
    let builder = ProcessGroup::builder().connect_timeout(Duration::from_millis(500));
    let error = builder.connect(&url, 1, 2).unwrap_err();
    assert!(matches!(&error, DdpError::Connect { address, .. } if url.ends_with(address)));
    assert!(start.elapsed() < Duration::from_secs(5));
}

/// The system takes the connection to a program that is stopped, or no master, and nothing comes.
#[test]
fn a_master_that_says_nothing_takes_no_more_than_the_time_that_is_left() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("tcp://{}", listener.local_addr().unwrap());
    let start = Instant::now();
    let builder = ProcessGroup::builder().connect_timeout(Duration::from_millis(300));
    let error = builder.connect(&url, 1, 2).unwrap_err();
    assert!(matches!(error, DdpError::Connect { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(3));
}

#[test]
fn a_name_that_no_machine_has_yet_is_waited_for() {
    let limit = Duration::from_millis(600);
    for rank in [0, 1] {
        let start = Instant::now();
        let builder = ProcessGroup::builder().connect_timeout(limit);
        let url = "tcp://no-such-host.invalid:29500";
        let error = builder.connect(url, rank, 2).unwrap_err();
        let DdpError::Connect { after, problem, .. } = &error else {
            panic!("{error}");
        };
        assert!(start.elapsed() >= limit && *after == limit, "{error}");
        assert!(problem.contains("unknown host"), "{error}");
    }
}

#[test]
fn strangers_and_garbage_do_not_disturb_the_job() {
    let port = free_port();
    let url = format!("tcp://127.0.0.1:{port}");
    thread::scope(|scope| {
        let join = |rank| {
            let url = &url;
            scope.spawn(move || {
                ProcessGroup::builder()
                    .timeout(Duration::from_secs(30))
                    .secret("ours")
                    .connect(url, rank, 2)
                    .unwrap()
            })
        };
        let first = join(0);
        let mut connections = Vec::new();
        while connections.len() < 20 {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                connections.push(stream);
            }
        }
        // Some send garbage, some nothing, some hang up.
        for (index, stream) in connections.iter_mut().enumerate() {
            if index % 3 == 0 {
                stream.write_all(&[0xFF; 200]).unwrap();
            }
        }
        connections.truncate(15);

        let guess = ProcessGroup::builder()
            .timeout(Duration::from_secs(5))
            .secret("a guess")
            .connect(&url, 1, 2)
            .unwrap_err();
        assert!(
            matches!(&guess, DdpError::Refused { rank: 1, reason } if reason.contains("secret"))
        );
        for (rank, world_size, sockets, why) in [
            (1, 3, 1, "world sizes differ"),
            (1, 2, 4, "numbers of sockets"),
            (0, 2, 1, "in use"),
        ] {
            let builder = ProcessGroup::builder().timeout(Duration::from_secs(5));
            let error = builder
                .secret("ours")
                .sockets(sockets)
                .connect(&url, rank, world_size)
                .unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }

        let second = join(1);
        let groups = [first.join().unwrap(), second.join().unwrap()];
        let listening = TcpStream::connect(("127.0.0.1", port));
        let mut stream = listening.expect("it still listens, for duplicates");
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        let groups = groups.map(|group| {
            scope.spawn(move || {
                let mut data = [1f32];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [2.0]);
                // It listens for as long as it lives.
                group
            })
        });
        let limit = Some(Duration::from_secs(20));
        stream.set_read_timeout(limit).unwrap();
        stream
            .read_exact(&mut [0])
            .expect("a challenge comes first");
        for group in groups {
            drop(group.join().unwrap());
        }
    });
}

#[test]
fn a_duplicate_rank_is_refused() {
    let url = format!("tcp://127.0.0.1:{}", free_port());
    thread::scope(|scope| {
        let join = |rank| {
            let url = &url;
            scope.spawn(move || {
                let builder = ProcessGroup::builder().timeout(Duration::from_secs(30));
                builder.connect(url, rank, 3)
            })
        };
        let master = join(0);
        let mut twins = vec![join(1), join(1)];
        let second = loop {
            if let Some(ended) = twins.iter().position(|rank| rank.is_finished()) {
                break twins.remove(ended);
            }
            thread::sleep(Duration::from_millis(10));
        };
        let error = second.join().unwrap().unwrap_err();
        assert!(
            matches!(&error, DdpError::Refused { rank: 1, .. }),
            "{error}"
        );
        let last = join(2);
        for rank in twins.into_iter().chain([master, last]) {
            assert!(rank.join().unwrap().is_ok());
        }
    });
}

#[test]
fn a_restarted_rank_may_register_again() {
    let (_folder, url) = meeting_place();
    let early = start_one("sum", 1, 3, &url, 30.0);
    let master = start_one("sum", 0, 3, &url, 30.0);
    thread::sleep(Duration::from_millis(500));
    early.signal(Signal::SIGKILL);
    drop(early);
    let others = [1, 2].map(|rank| start_one("sum", rank, 3, &url, 30.0));
    for rank in others.into_iter().chain([master]) {
        rank.succeed(40);
    }
}
