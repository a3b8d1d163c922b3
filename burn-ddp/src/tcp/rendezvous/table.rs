//! The table of where all ranks listen, and how rank 0 sends it.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    time::Instant,
};

use serde::{Deserialize, Serialize};

use crate::{
    DdpError,
    tcp::handshake::{self, HANDSHAKE},
};

/// Where a rank listens. Without `ip`, it is on the master's machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Endpoint {
    pub(super) ip: Option<IpAddr>,
    pub(super) port: u16,
}

impl Endpoint {
    /// Its address for a rank that reaches the master at `master`. A link-local address gets the scope of the master's, because
    /// it is on the same link.
    pub(super) fn seen_from(&self, master: SocketAddr) -> SocketAddr {
        let mut address = SocketAddr::new(self.ip.unwrap_or(master.ip()), self.port);
        if let (SocketAddr::V6(address), SocketAddr::V6(master)) = (&mut address, master)
            && address.ip().is_unicast_link_local()
        {
            address.set_scope_id(master.scope_id());
        }
        address
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Table {
    pub(super) session: u64,
    pub(super) endpoints: Vec<Endpoint>,
}

pub(super) fn tell(stream: &TcpStream, table: &Result<Table, DdpError>) -> io::Result<()> {
    let text = serde_json::to_vec(table)?;
    let mut message = (text.len() as u32).to_le_bytes().to_vec();
    message.extend_from_slice(&text);
    handshake::write_all(stream, &message, Instant::now() + HANDSHAKE)
}

pub(super) fn hear(stream: &TcpStream, deadline: Instant) -> io::Result<Result<Table, DdpError>> {
    let mut length = [0; 4];
    handshake::read_exact(stream, &mut length, deadline)?;
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    handshake::read_exact(stream, &mut text, deadline)?;
    Ok(serde_json::from_slice(&text)?)
}
