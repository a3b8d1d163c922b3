//! Tests of which callers are let in, and what the others are told.

use super::*;
use std::{net::TcpListener, thread};

fn shake(caller: &str, listener: &str, hello: Hello) -> (Result<(), Failure>, Option<Hello>) {
    shake_with(caller, listener, hello.encode())
}

fn shake_with(
    caller: &str,
    listener: &str,
    body: [u8; HELLO],
) -> (Result<(), Failure>, Option<Hello>) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let key = Key::from_secret(caller);
    let caller = thread::spawn(move || {
        let until = Instant::now() + HANDSHAKE;
        present(&TcpStream::connect(address).unwrap(), &key, &body, until)
    });
    let (stream, _) = server.accept().unwrap();
    let seen = answer(&stream, &Key::from_secret(listener), |hello| {
        match hello.world_size {
            2 => Verdict::Welcome,
            _ => Verdict::WorldSize,
        }
    });
    (caller.join().unwrap(), seen.unwrap().ok())
}

const LINK: Hello = Hello {
    purpose: Purpose::Link {
        communicator: 3,
        lane: 1,
    },
    world_size: 2,
    rank: 1,
    sockets: 3,
    session: 77,
};

#[test]
fn the_right_secret_is_welcome() {
    let (caller, listener) = shake("s", "s", LINK);
    assert!(caller.is_ok());
    assert_eq!(listener, Some(LINK));
}

#[test]
fn another_secret_is_refused() {
    let (caller, listener) = shake("s", "t", LINK);
    assert!(matches!(caller, Err(Failure::Refused(Verdict::Secret))));
    assert_eq!(listener, None);
}

#[test]
fn another_version_is_refused_and_told_so() {
    let mut body = LINK.encode();
    let version = u16::from_le_bytes([body[0], body[1]]);
    for other in [version - 1, version + 1] {
        body[..2].copy_from_slice(&other.to_le_bytes());
        let (caller, listener) = shake_with("s", "s", body);
        let Err(Failure::Refused(verdict)) = caller else {
            panic!("{caller:?}");
        };
        assert_eq!(verdict, Verdict::Version);
        assert!(verdict.reason().contains("version"));
        assert_eq!(listener, None);
    }
}

#[test]
fn the_judge_decides() {
    let hello = Hello {
        world_size: 3,
        ..LINK
    };
    let (caller, listener) = shake("s", "s", hello);
    assert!(matches!(caller, Err(Failure::Refused(Verdict::WorldSize))));
    assert_eq!(listener, None);
}

#[test]
fn an_answer_that_is_there_is_read_however_late() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut caller = TcpStream::connect(server.local_addr().unwrap()).unwrap();
    let (stream, _) = server.accept().unwrap();
    caller.write_all(b"late").unwrap();
    stream.peek(&mut [0]).unwrap();
    let mut bytes = [0; 4];
    read_exact(&stream, &mut bytes, Instant::now() - HANDSHAKE).unwrap();
    assert_eq!(&bytes, b"late");
    let late = read_exact(&stream, &mut bytes, Instant::now() - HANDSHAKE);
    assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
}

#[test]
fn a_dribbling_caller_is_cut_off() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(server.local_addr().unwrap()).unwrap();
    let (peer, _) = server.accept().unwrap();
    let dribble = thread::spawn(move || {
        let mut stream = &stream;
        while stream.write_all(&[0]).is_ok() {
            thread::sleep(Duration::from_millis(10));
        }
    });
    let start = Instant::now();
    let mut bytes = [0; 1000];
    let result = read_exact(&peer, &mut bytes, start + Duration::from_millis(200));
    assert_eq!(result.unwrap_err().kind(), io::ErrorKind::TimedOut);
    assert!(start.elapsed() < Duration::from_secs(2));
    drop(peer);
    dribble.join().unwrap();
}
