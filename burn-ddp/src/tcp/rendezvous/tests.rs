//! Tests of registering at the master.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::{
    Place,
    register::{Attempt, register, register_at_one},
    table::{Endpoint, Table, tell},
};
use crate::{
    DdpError,
    tcp::{
        acceptor::Acceptor,
        handshake::{self, HANDSHAKE, Identity, Key, Purpose},
    },
    transport::Deadline,
};

fn own(rank: usize) -> Identity {
    Identity {
        key: Key::from_secret("s"),
        rank,
        world_size: 2,
        sockets: 1,
    }
}

/// Addresses of this machine on which nobody listens.
fn deserted() -> [SocketAddr; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap())
}

#[test]
fn the_first_address_that_answers_is_taken() {
    let limit = Deadline::after(Duration::from_secs(60));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let [first, second] = deserted();
    let master = Acceptor::start(listener, own(0)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let arrived = master.wait_registered(limit).unwrap();
            let endpoints = Vec::new();
            tell(
                &arrived[&1].stream,
                &Ok(Table {
                    session: 7,
                    endpoints,
                }),
            )
            .unwrap();
        });
        let place = Place::File("unread".into());
        let addresses = vec![first, second, address];
        let joined = register_at_one(addresses, &place, &mut None, &own(1), limit);
        let Ok((found, table, _stream)) = joined else {
            panic!("one of them listens");
        };
        assert_eq!((found, table.session), (address, 7));
    });
}

#[test]
fn all_addresses_that_do_not_answer_are_listed() {
    let limit = Deadline::after(Duration::from_secs(60));
    let addresses = deserted();
    let place = Place::File("unread".into());
    let joined = register_at_one(addresses.into(), &place, &mut None, &own(1), limit);
    let Err(Attempt::Again(problem)) = joined else {
        panic!("nobody listens");
    };
    for address in addresses {
        assert!(problem.contains(&format!("{address}: ")), "{problem}");
    }
    assert_eq!(problem.matches("refused").count(), 2, "{problem}");
}

fn third(rank: usize) -> Identity {
    Identity {
        world_size: 3,
        ..own(rank)
    }
}

/// Registers as a rank, and closes the connection at once.
fn come_and_go(master: SocketAddr, rank: usize) {
    let stream = TcpStream::connect(master).unwrap();
    let own = third(rank);
    let hello = own.hello(Purpose::Register { port: 1 }, 0);
    let until = Instant::now() + HANDSHAKE;
    handshake::call(&stream, &own.key, &hello, until).unwrap();
}

#[test]
fn who_has_died_is_missing_like_who_never_came() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let master = Acceptor::start(listener, third(0)).unwrap();
    come_and_go(address, 1);
    let limit = Deadline::after(Duration::from_millis(500));
    let Err(DdpError::MissingRanks { missing, .. }) = master.wait_registered(limit) else {
        panic!("nobody is there");
    };
    assert_eq!(missing, [1, 2]);
}

/// Without a refusal, nobody would ever answer it.
#[test]
fn a_rank_that_comes_when_the_job_has_begun_is_told_so() {
    let limit = Deadline::after(Duration::from_secs(60));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let master = Acceptor::start(listener, own(0)).unwrap();
    master.set_session(7);
    let place = Place::File("unread".into());
    let joined = register(address, &mut None, &place, &own(1), limit);
    let Err(Attempt::Again(problem)) = joined else {
        panic!("the job has begun");
    };
    assert!(problem.contains("has begun"), "{problem}");
}

/// The rank that fails first should be the first to end, so dropping an acceptor must not take long.
#[test]
fn who_leaves_waits_for_no_callers() {
    let mut waits = [(); 40].map(|()| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let acceptor = Acceptor::start(listener, own(0)).unwrap();
        // By now, the acceptor's thread waits for callers.
        thread::sleep(Duration::from_millis(2));
        let start = std::time::Instant::now();
        drop(acceptor);
        start.elapsed()
    });
    // Some may have waited for a busy machine.
    waits.sort();
    assert!(waits[waits.len() / 2] < Duration::from_millis(20));
}

#[test]
fn an_address_of_a_link_is_one_of_the_masters_link() {
    let seen = |ip: Option<&str>, master: &str| {
        let ip = ip.map(|ip| ip.parse().unwrap());
        let endpoint = Endpoint { ip, port: 7 };
        endpoint.seen_from(master.parse().unwrap()).to_string()
    };
    let master = "[fe80::1%3]:29500";
    assert_eq!(seen(None, master), "[fe80::1%3]:7");
    assert_eq!(seen(Some("fe80::2"), master), "[fe80::2%3]:7");
    assert_eq!(seen(Some("2001:db8::2"), master), "[2001:db8::2]:7");
    assert_eq!(seen(None, "[2001:db8::1]:29500"), "[2001:db8::1]:7");
    assert_eq!(seen(Some("10.0.0.2"), "10.0.0.1:29500"), "10.0.0.2:7");
}
