//! A network that fails without a word, and one full of strangers.

use std::{
    collections::HashSet,
    fs,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::atomic::{AtomicU8, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use crate::suite::{
    faults::free_port,
    ranks::{meeting_place, start, start_one},
};

const FORWARDS: u8 = 0;
/// Connections stay open, and nothing comes through.
const FROZEN: u8 = 1;
const OVER: u8 = 2;

/// Passes on what comes, while the link forwards.
fn forward(mut from: TcpStream, mut to: TcpStream, state: &AtomicU8) {
    from.set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match state.load(Ordering::SeqCst) {
            OVER => return,
            FROZEN => thread::sleep(Duration::from_millis(20)),
            _ => match from.read(&mut buffer) {
                Ok(0) => {
                    let _ = to.shutdown(Shutdown::Write);
                    return;
                }
                Ok(len) => {
                    if to.write_all(&buffer[..len]).is_err() {
                        return;
                    }
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => return,
            },
        }
    }
}

/// What rank 0 has published.
fn master(file: &Path) -> SocketAddr {
    let start = Instant::now();
    loop {
        if let Ok(text) = fs::read_to_string(file)
            && let Ok(address) = text.trim().parse()
        {
            return address;
        }
        assert!(start.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(5));
    }
}

/// All of 127.0.0.0/8 is this machine on Linux, so that the link can have rank 0's port at another address.
#[cfg(target_os = "linux")]
#[test]
fn a_link_that_is_half_open_is_found_out_within_the_timeout() {
    let (folder, url) = meeting_place();
    let mut ranks = vec![start_one("loop", 0, 2, &url, 3.0)];
    let master = master(&folder.path().join("master"));
    let link = SocketAddr::new([127, 0, 0, 2].into(), master.port());
    let listener = TcpListener::bind(link).unwrap();
    listener.set_nonblocking(true).unwrap();
    let other = folder.path().join("link");
    fs::write(&other, link.to_string()).unwrap();
    let state = AtomicU8::new(FORWARDS);
    thread::scope(|scope| {
        let over = Over(&state);
        scope.spawn(|| {
            while state.load(Ordering::SeqCst) != OVER {
                let Ok((from, _)) = listener.accept() else {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                };
                from.set_nonblocking(false).unwrap();
                let to = TcpStream::connect(master).unwrap();
                let state = &state;
                let (back, away) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                scope.spawn(move || forward(from, to, state));
                scope.spawn(move || forward(away, back, state));
            }
        });
        // All that the ranks say to each other goes over the link.
        let through = format!("file://{}", other.display());
        ranks.push(start_one("loop", 1, 2, &through, 3.0));
        ranks[1].wait_for_steps(3);
        state.store(FROZEN, Ordering::SeqCst);
        let ends: Vec<_> = ranks
            .into_iter()
            .map(|rank| rank.finish(Duration::from_secs(20)))
            .collect();
        drop(over);
        for (rank, (success, output)) in ends.into_iter().enumerate() {
            assert!(!success);
            let late = format!("waiting for ranks [{}]", 1 - rank);
            assert!(output.contains("RESULT error"), "rank {rank}: {output}");
            assert!(
                output.contains("did not finish within 3s"),
                "rank {rank}: {output}"
            );
            assert!(output.contains(&late), "rank {rank}: {output}");
        }
    });
}

/// Ends the link, even when a test fails.
struct Over<'a>(&'a AtomicU8);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(OVER, Ordering::SeqCst);
    }
}

#[test]
fn a_master_that_stops_before_the_others_come_holds_nobody_up() {
    let (folder, url) = meeting_place();
    let first = start_one("sum", 0, 3, &url, 3.0);
    master(&folder.path().join("master"));
    first.signal(Signal::SIGSTOP);
    // The system takes their connections, and what they say.
    let others = [1, 2].map(|rank| start_one("sum", rank, 3, &url, 3.0));
    for rank in others {
        let output = rank.fail(20);
        assert!(output.contains("RESULT error"), "{output}");
    }
    first.signal(Signal::SIGCONT);
    let output = first.fail(20);
    assert!(output.contains("RESULT error"), "{output}");
}

#[test]
fn ranks_meet_over_ipv6() {
    if TcpListener::bind("[::1]:0").is_err() {
        eprintln!("skipped: this machine has no IPv6");
        return;
    }
    let url = format!("tcp://[::1]:{}", free_port());
    for rank in start("sum", 3, &url, 60.0) {
        let output = rank.succeed(60);
        assert!(output.contains("RESULT ok 4.5"), "{output}");
    }
}

/// The ports on which a process listens.
#[cfg(target_os = "linux")]
fn ports(pid: u32) -> Vec<u16> {
    /// 127.0.0.1 in the kernel's tables, in an address of version 6 too.
    const LOOPBACK: &str = "0100007F";
    let sockets: HashSet<String> = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|target| {
            let inode = target
                .to_str()?
                .strip_prefix("socket:[")?
                .strip_suffix(']')?;
            Some(inode.to_string())
        })
        .collect();
    let mut ports = Vec::new();
    for table in ["tcp", "tcp6"] {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap();
        for line in text.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let listens = fields[3] == "0A";
            if listens && sockets.contains(fields[9]) {
                // One of another address is none of ours: NCCL's pass from a process to those that it starts.
                let (address, port) = fields[1].rsplit_once(':').unwrap();
                if address.ends_with(LOOPBACK) || address.chars().all(|digit| digit == '0') {
                    ports.push(u16::from_str_radix(port, 16).unwrap());
                }
            }
        }
    }
    ports
}

#[cfg(target_os = "linux")]
#[test]
fn a_port_scan_does_not_disturb_a_job() {
    let (_folder, url) = meeting_place();
    let mut ranks = start("loop", 2, &url, 30.0);
    ranks[0].wait_for_steps(2);
    let mut held = Vec::new();
    for rank in &ranks {
        let ports = ports(rank.0.id());
        assert!(!ports.is_empty(), "each rank listens");
        for port in ports {
            // As scanners do: half of a connection, whole ones, banners, and some that stay.
            for probe in 0..30 {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                let greeting: &[u8] = match probe % 5 {
                    0 => b"",
                    1 => b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n",
                    2 => &[0x16, 3, 1, 2, 0, 1, 0, 1, 0xFC, 3, 3],
                    3 => b"BDDP",
                    _ => &[0; 4096],
                };
                // It may have hung up already.
                let _ = stream.write_all(greeting);
                match probe % 3 {
                    0 => drop(stream),
                    1 => drop(stream.shutdown(Shutdown::Write)),
                    _ => held.push(stream),
                }
            }
        }
    }
    for rank in &mut ranks {
        rank.wait_for_steps(20);
        assert!(rank.0.try_wait().unwrap().is_none(), "it goes on");
    }
}

/// More callers than a rank listens to at a time hold their connections and say nothing.
#[cfg(target_os = "linux")]
#[test]
fn sockets_that_strangers_hold_do_not_keep_the_ranks_from_each_other() {
    let (_folder, url) = meeting_place();
    let mut ranks = start("duplicate", 2, &url, 30.0);
    ranks[0].wait_for_steps(2);
    let mut held = Vec::new();
    for port in ports(ranks[0].0.id()) {
        for _ in 0..300 {
            held.push(TcpStream::connect(("127.0.0.1", port)).unwrap());
        }
    }
    // The last one gets its challenge: all were taken in.
    let last = held.last_mut().expect("rank 0 listens");
    let limit = Some(Duration::from_secs(20));
    last.set_read_timeout(limit).unwrap();
    last.read_exact(&mut [0; 24]).unwrap();
    for rank in &mut ranks {
        rank.wait_for_steps(20);
        assert!(rank.0.try_wait().unwrap().is_none(), "it goes on");
    }
    drop(held);
}
