//! What can go wrong while the ranks meet.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use burn_ddp::{DdpError, ProcessGroup, ReduceOp};
use nix::sys::signal::Signal;

use super::free_port;
use crate::suite::ranks::{meeting_place, start_one};

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
