//! Resolves host names to addresses.

use std::{
    net::{SocketAddr, ToSocketAddrs},
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
        match resolve(host, port) {
            Ok(addresses) => return Ok(addresses),
            Err(problem) if deadline.left().is_none() => {
                return Err(DdpError::Connect {
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
pub(super) fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    let mut addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|error| format!("unknown host: {error}"))?
        .collect();
    // A host may have both IPv4 and IPv6 addresses, and only one kind may work. All ranks begin with IPv4.
    addresses.sort_by_key(SocketAddr::is_ipv6);
    match addresses.is_empty() {
        true => Err("the host has no address".into()),
        false => Ok(addresses),
    }
}
