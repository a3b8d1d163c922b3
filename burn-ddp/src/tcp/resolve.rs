//! Resolves host names to addresses.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::mpsc,
    thread,
    time::Duration,
};

use crate::{DdpError, transport::Deadline};

/// The addresses of a host. Tries until the deadline, because the name may only be known once the host's machine has started.
pub(super) fn resolve_in_time(
    host: &str,
    port: u16,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, DdpError> {
    let mut pause = Duration::from_millis(10);
    loop {
        match resolve(host, port, deadline) {
            Ok(addresses) => return Ok(addresses),
            Err(problem) if deadline.left().is_none() => {
                return Err(DdpError::Connect {
                    rank: 0,
                    address: format!("{host}:{port}"),
                    after: deadline.after,
                    problem,
                });
            }
            Err(_) => thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(300));
    }
}

/// The addresses of a host, at least one, or a text that says why there is none yet.
pub(super) fn resolve(
    host: &str,
    port: u16,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, String> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let name = host.to_string();
    let mut addresses = in_time(deadline, move || {
        (name.as_str(), port)
            .to_socket_addrs()
            .map(Iterator::collect)
    })?;
    // A host may have both IPv4 and IPv6 addresses, and only one kind may work. All ranks begin with IPv4.
    addresses.sort_by_key(SocketAddr::is_ipv6);
    match addresses.is_empty() {
        true => Err("the host has no address".into()),
        false => Ok(addresses),
    }
}

/// Looks a name up on a thread of its own: the system sets its own limit, which may be longer than the deadline. The thread of
/// a look-up that takes too long is left behind; as the time is over then, there is one at most.
fn in_time(
    deadline: Deadline,
    look_up: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
) -> Result<Vec<SocketAddr>, String> {
    let (found, addresses) = mpsc::channel();
    let thread = thread::Builder::new().name("ddp-resolve".into());
    thread
        // Fails when nobody waits any more.
        .spawn(move || found.send(look_up()))
        .map_err(|error| format!("looking the host up: {error}"))?;
    let left = deadline.left().unwrap_or(Duration::from_millis(1));
    match addresses.recv_timeout(left) {
        Ok(found) => found.map_err(|error| format!("unknown host: {error}")),
        Err(_) => Err("unknown host: its look-up did not end in time".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_look_up_takes_no_more_than_the_time_that_is_left() {
        let address = SocketAddr::from(([127, 0, 0, 1], 7));
        let look_up = move |takes| {
            move || {
                thread::sleep(takes);
                Ok(vec![address])
            }
        };
        let at_once = look_up(Duration::ZERO);
        let long = Deadline::after(Duration::from_secs(60));
        assert_eq!(in_time(long, at_once), Ok(vec![address]));
        let start = Instant::now();
        let limit = Deadline::after(Duration::from_millis(200));
        let problem = in_time(limit, look_up(Duration::from_secs(30))).unwrap_err();
        assert!(problem.contains("in time"), "{problem}");
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn an_address_is_not_looked_up() {
        let over = Deadline::after(Duration::ZERO);
        for host in ["127.0.0.1", "::1"] {
            let found = resolve(host, 7, over).unwrap();
            assert_eq!(found, [SocketAddr::new(host.parse().unwrap(), 7)]);
        }
    }
}
