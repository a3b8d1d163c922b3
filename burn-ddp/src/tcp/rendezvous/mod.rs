//! How the ranks find each other: rank 0 publishes where it listens, the others register there,
//! and get the table of all addresses.

mod host;
mod link;
mod place;
mod register;
mod table;

use std::{
    collections::HashMap,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

#[cfg(test)]
pub(super) use self::place::takes_both;
use self::{host::host, register::join};
pub(crate) use self::{
    link::{Unlinked, link},
    place::Place,
};
use super::{acceptor::Acceptor, handshake::Identity};
use crate::{DdpError, transport::Deadline};

/// How much longer than its own time limit a rank waits for what rank 0 sends at the end of rank 0's limit.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// What a rank knows after the rendezvous.
pub(crate) struct Met {
    pub(crate) acceptor: Acceptor,
    pub(crate) session: u64,
    /// Where each rank listens. On rank 0, which calls no other rank, all entries are its own address.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The connections over which the ranks registered: on rank 0 those to all other ranks, on the others the one to rank 0.
    pub(crate) star: HashMap<usize, TcpStream>,
}

/// Meets the other ranks.
pub(crate) fn meet(place: &Place, own: &Identity, deadline: Deadline) -> Result<Met, DdpError> {
    match own.rank {
        0 => host(place, own, deadline),
        _ => join(place, own, deadline),
    }
}

#[cfg(test)]
mod tests;
