//! Tests of ranks that fail after registering and before being connected, and of the addresses where ranks listen.

use std::{
    net::TcpListener,
    thread,
    time::{Duration, Instant},
};

use super::*;

/// The errors with which ranks 0 and 2 fail to connect while rank 1 registers and then runs `fate`, and the time it took.
fn beside(limit: Duration, fate: impl Fn(Met) + Sync) -> (Vec<String>, Duration) {
    let folder = tempfile::tempdir().unwrap();
    let place = Place::File(folder.path().join("master"));
    thread::scope(|scope| {
        let (place, fate) = (&place, &fate);
        scope.spawn(move || {
            let own = Identity {
                world_size: 3,
                ..own(&Key::from_secret("s"))
            };
            let met = rendezvous::meet(place, &own, Deadline::after(limit));
            fate(met.unwrap_or_else(|error| panic!("{error}")));
        });
        let start = Instant::now();
        let others = [0, 2].map(|rank| {
            scope.spawn(move || {
                let joined = connect(place, rank, 3, "s", 1, Deadline::after(limit));
                joined.map(drop).unwrap_err().to_string()
            })
        });
        let errors = others.map(|other| other.join().unwrap()).to_vec();
        (errors, start.elapsed())
    })
}

#[test]
fn a_rank_that_dies_before_it_is_connected_is_named_at_once() {
    let (errors, took) = beside(Duration::from_secs(60), drop);
    for error in errors {
        assert!(error.starts_with("rank 1 died"), "{error}");
    }
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn a_rank_that_never_connects_is_missing() {
    let limit = Duration::from_millis(1500);
    let (errors, _) = beside(limit, |met| {
        thread::sleep(4 * limit);
        drop(met);
    });
    for error in errors {
        let expected = "ranks [1] of 3 did not appear within 1.5s; were they started";
        assert!(error.starts_with(expected), "{error}");
    }
}

/// Ranks 0 and 2 do not answer rank 1, whether they should call it or listen to it.
#[test]
fn whoever_is_not_there_for_a_link_is_named() {
    let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listen();
    let key = Key::from_secret("s");
    let own = Identity {
        world_size: 3,
        ..own(&key)
    };
    let met = Met {
        acceptor: acceptor::Acceptor::start(listen(), own.clone()).unwrap(),
        session: 7,
        addresses: vec![silent.local_addr().unwrap(); 3],
        star: Default::default(),
    };
    let call = crate::call::tests::barrier();
    for peer in [0, 2] {
        let error = |call| {
            let deadline = Deadline::after(Duration::from_millis(300));
            let links = Links {
                own: &own,
                met: &met,
                call,
                deadline,
            };
            links.connect(peer, 5, 0, || false).map(drop).unwrap_err()
        };
        match error(None) {
            DdpError::MissingRanks { missing, .. } => assert_eq!((missing, peer), (vec![2], 2)),
            DdpError::Connect { rank, .. } => assert_eq!((rank, peer), (0, 0)),
            error => panic!("{error}"),
        }
        let DdpError::Timeout { ranks, why, .. } = error(Some(call)) else {
            panic!("it is the duplicate that ends");
        };
        assert_eq!(ranks, [peer]);
        assert!(why.contains("connect"), "{why}");
    }
}

#[test]
fn ranks_listen_on_loopback_only_where_all_are_on_one_machine_for_certain() {
    let place = |host: &str, local| Place::Address {
        host: host.into(),
        port: 1,
        local,
    };
    let store = |host: &str, local| Place::TorchStore {
        host: host.into(),
        port: 1,
        prefix: String::new(),
        local,
    };
    let listens = |place: &Place, ip: &str| {
        let ips = place.listening_ips(ip.parse().unwrap());
        let ips: Vec<String> = ips.iter().map(|ip| ip.to_string()).collect();
        ips.join(", ")
    };
    // The other ranks may know rank 0's machine by another name, of another kind.
    let everywhere = |ip: &str| match (rendezvous::takes_both(), ip) {
        (true, _) => "::, 0.0.0.0",
        (false, "::1") => "::",
        (false, _) => "0.0.0.0",
    };
    for make in [place, store] {
        for (host, ip) in [
            ("localhost", "127.0.0.1"),
            ("127.0.0.1", "127.0.0.1"),
            ("127.0.1.1", "127.0.1.1"),
            ("::1", "::1"),
        ] {
            assert_eq!(listens(&make(host, true), ip), ip, "{host}");
            assert_eq!(listens(&make(host, false), ip), everywhere(ip), "{host}");
        }
        // Debian's /etc/hosts maps a machine's own name to 127.0.1.1.
        for ip in ["127.0.1.1", "::1"] {
            assert_eq!(listens(&make("node01", false), ip), everywhere(ip));
        }
        assert_eq!(listens(&make("node01", false), "10.0.0.1"), "0.0.0.0");
        assert_eq!(listens(&make("10.0.0.1", true), "10.0.0.1"), "0.0.0.0");
    }
    let file = Place::File("/tmp/master".into());
    assert_eq!(listens(&file, "127.0.0.1"), "127.0.0.1");
}

/// The addresses of one machine as its ranks may know it: all of them reach each other.
#[test]
fn a_master_that_knows_itself_as_localhost_is_found_by_ipv6_too() {
    if TcpListener::bind("[::1]:0").is_err() || !rendezvous::takes_both() {
        eprintln!("skipped: this machine has no IPv6, or keeps it apart from IPv4");
        return;
    }
    let port = TcpListener::bind("[::]:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let hosts = ["localhost", "::1", "127.0.0.1"];
    thread::scope(|scope| {
        let ranks: Vec<_> = hosts
            .iter()
            .enumerate()
            .map(|(rank, host)| {
                let place = Place::Address {
                    host: (*host).into(),
                    port,
                    local: false,
                };
                scope.spawn(move || {
                    let limit = Deadline::after(Duration::from_secs(10));
                    connect(&place, rank, 3, "s", 1, limit)
                })
            })
            .collect();
        // None goes before all have come.
        let ranks: Vec<_> = ranks.into_iter().map(|it| it.join().unwrap()).collect();
        for rank in ranks {
            rank.map(drop).unwrap();
        }
    });
}

fn own(key: &Key) -> Identity {
    Identity {
        key: key.clone(),
        rank: 1,
        world_size: 2,
        sockets: 1,
    }
}

const LINK: Purpose = Purpose::Link {
    communicator: 0,
    lane: 0,
};

#[test]
fn a_caller_that_is_cut_off_calls_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let key = Key::from_secret("s");
    thread::scope(|scope| {
        let (listener, key) = (&listener, &key);
        scope.spawn(move || {
            // Two calls are cut off, and the third is told to come later.
            for _ in 0..2 {
                drop(listener.accept().unwrap());
            }
            for verdict in [handshake::Verdict::Session, handshake::Verdict::Welcome] {
                let (stream, _) = listener.accept().unwrap();
                let _ = handshake::answer(&stream, key, |_| verdict).unwrap();
            }
        });
        let limit = Deadline::after(Duration::from_secs(30));
        let hello = own(key).hello(LINK, 7);
        rendezvous::link(address, key, &hello, limit, || false).unwrap();
    });
}

#[test]
fn a_caller_gives_up_when_its_group_has_a_fault() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let key = Key::from_secret("s");
    let hello = own(&key).hello(LINK, 7);
    let start = Instant::now();
    let limit = Deadline::after(Duration::from_secs(60));
    let interrupted = || start.elapsed() > Duration::from_millis(200);
    let unlinked = rendezvous::link(address, &key, &hello, limit, interrupted);
    let Err(Unlinked::Late(problem)) = unlinked else {
        panic!("{unlinked:?}");
    };
    assert!(problem.contains("refused"), "{problem}");
    assert!(start.elapsed() < Duration::from_secs(20));
    // Without a fault, it gives up when its time is over.
    let limit = Deadline::after(Duration::from_millis(200));
    assert!(rendezvous::link(address, &key, &hello, limit, || false).is_err());
}
