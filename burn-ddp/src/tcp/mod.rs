//! The transport over TCP: rendezvous, connections, control plane.

use std::{collections::HashMap, net::TcpStream, sync::Arc};

use socket2::SockRef;

mod acceptor;
mod control;
mod handshake;
mod mesh;
mod rendezvous;
mod torch_store;

pub(crate) use rendezvous::Place;

use self::{
    control::Control,
    handshake::{Hello, Key, Purpose},
    mesh::Mesh,
    rendezvous::Met,
};
use crate::{
    DdpError,
    transport::{Deadline, Transport},
};

/// The communicator number of the control connections.
const CONTROL: u32 = u32::MAX;
/// Kernel buffers of a data connection, so that large payloads move in few system calls.
const BUFFER: usize = 4 << 20;

/// What all communicators of one rank share.
struct Job {
    rank: usize,
    world_size: usize,
    lanes: usize,
    key: Key,
    met: Met,
    control: Control,
}

/// Meets the other ranks at `place` and connects to all of them.
pub(crate) fn connect(
    place: &Place,
    rank: usize,
    world_size: usize,
    secret: &str,
    lanes: usize,
    deadline: Deadline,
) -> Result<Box<dyn Transport>, DdpError> {
    let key = Key::from_secret(secret);
    let met = rendezvous::meet(place, &key, rank, world_size, deadline)?;
    let links = Links {
        rank,
        world_size,
        key: &key,
        met: &met,
        deadline,
    };
    let mut streams = HashMap::new();
    for peer in (0..world_size).filter(|peer| *peer != rank) {
        streams.insert(peer, links.connect(peer, CONTROL, 0, || false)?);
    }
    let control = Control::start(rank, streams)
        .map_err(|error| DdpError::io("starting the control thread", error))?;
    let job = Arc::new(Job {
        rank,
        world_size,
        lanes,
        key,
        met,
        control,
    });
    let everyone: Vec<usize> = (0..world_size).collect();
    let lanes = job.connect(0, &everyone, deadline)?;
    let mesh = Mesh::new(job, 0, lanes);
    Ok(Box::new(mesh.map_err(|error| {
        DdpError::io("preparing connections", error)
    })?))
}

impl Job {
    /// Connects the lanes of a new communicator; its members do so together.
    fn connect(
        &self,
        communicator: u32,
        members: &[usize],
        deadline: Deadline,
    ) -> Result<Vec<Vec<TcpStream>>, DdpError> {
        let links = Links {
            rank: self.rank,
            world_size: self.world_size,
            key: &self.key,
            met: &self.met,
            deadline,
        };
        let connect = |peer: usize| -> Result<Vec<TcpStream>, DdpError> {
            if peer == self.rank || !members.contains(&peer) {
                return Ok(Vec::new());
            }
            let lanes = 0..self.lanes as u32;
            lanes
                .map(|lane| {
                    let stream = links
                        .connect(peer, communicator, lane, || self.control.fault().is_some())?;
                    let socket = SockRef::from(&stream);
                    // The kernel may grant less: slower, not wrong.
                    let _ = socket.set_send_buffer_size(BUFFER);
                    let _ = socket.set_recv_buffer_size(BUFFER);
                    Ok(stream)
                })
                .collect()
        };
        let lanes: Result<_, DdpError> = (0..self.world_size).map(connect).collect();
        lanes.map_err(|error| self.control.fail(error))
    }
}

/// Makes the connections between ranks: the higher rank calls, the lower one listens.
struct Links<'a> {
    rank: usize,
    world_size: usize,
    key: &'a Key,
    met: &'a Met,
    deadline: Deadline,
}

impl Links<'_> {
    fn connect(
        &self,
        peer: usize,
        communicator: u32,
        lane: u32,
        interrupted: impl Fn() -> bool,
    ) -> Result<TcpStream, DdpError> {
        let stream = if peer < self.rank {
            let hello = Hello {
                purpose: Purpose::Link { communicator, lane },
                world_size: self.world_size as u32,
                rank: self.rank as u32,
                session: self.met.session,
            };
            let address = self.met.addresses[peer];
            rendezvous::link(address, self.key, &hello, self.deadline).map_err(|problem| {
                DdpError::Aborted {
                    rank: self.rank,
                    reason: format!("no connection to rank {peer} at {address}: {problem}"),
                }
            })?
        } else {
            let acceptor = &self.met.acceptor;
            acceptor
                .wait_link(peer, communicator, lane, self.deadline, interrupted)
                .ok_or_else(|| DdpError::Aborted {
                    rank: self.rank,
                    reason: format!(
                        "rank {peer} did not connect within {:?}",
                        self.deadline.after
                    ),
                })?
        };
        stream
            .set_nodelay(true)
            .map_err(|error| DdpError::io("preparing a connection", error))?;
        Ok(stream)
    }
}
