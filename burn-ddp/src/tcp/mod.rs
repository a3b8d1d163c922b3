//! The transport over TCP: rendezvous, connections, control plane.

use std::{io, net::TcpStream, sync::Arc, time::Duration};

mod acceptor;
mod connection;
mod control;
mod descriptors;
mod handshake;
mod mesh;
mod rendezvous;
mod resolve;
mod stripe;
mod torch_store;

pub(crate) use rendezvous::Place;

use self::{
    control::Control,
    handshake::{Identity, Key, Purpose},
    mesh::Mesh,
    rendezvous::{Met, Unlinked},
};
use crate::{
    Call, DdpError,
    transport::{Deadline, Transport},
};

/// The number that stands for the control connections in place of a communicator's.
const CONTROL: u32 = u32::MAX;

/// The state that all communicators of one rank share.
struct Job {
    own: Identity,
    met: Met,
    control: Control,
}

/// Meets the other ranks at `place` and connects to all of them.
pub(crate) fn connect(
    place: &Place,
    rank: usize,
    world_size: usize,
    secret: &str,
    sockets: usize,
    deadline: Deadline,
) -> Result<Box<dyn Transport>, DdpError> {
    let mesh = connect_mesh(place, rank, world_size, secret, sockets, deadline)?;
    Ok(Box::new(mesh))
}

fn connect_mesh(
    place: &Place,
    rank: usize,
    world_size: usize,
    secret: &str,
    sockets: usize,
    deadline: Deadline,
) -> Result<Mesh, DdpError> {
    descriptors::make_room(world_size, sockets);
    let own = Identity {
        key: Key::from_secret(secret),
        rank,
        world_size,
        sockets,
    };
    let mut met = rendezvous::meet(place, &own, deadline)?;
    let control = control(&own, &mut met, deadline)?;
    let job = Arc::new(Job { own, met, control });
    let everyone: Vec<usize> = (0..world_size).collect();
    let lanes = job.connect(0, &everyone, None, deadline)?;
    let mesh = Mesh::new(job.clone(), 0, lanes);
    mesh.map_err(|error| job.unprepared(error))
}

/// Makes the control connections between all ranks. Until all ranks have them, the connections to rank 0 over
/// which the ranks registered serve as control plane: through rank 0, all learn when a rank fails.
fn control(own: &Identity, met: &mut Met, deadline: Deadline) -> Result<Control, DdpError> {
    let failed = |error| DdpError::io("starting the control thread", error);
    let star = Control::start(own.rank, std::mem::take(&mut met.star)).map_err(failed)?;
    let links = Links {
        own,
        met,
        call: None,
        deadline,
    };
    let connect = |peer| -> Result<(usize, TcpStream), DdpError> {
        let stream = links.connect(peer, CONTROL, 0, || star.fault().is_some());
        Ok((peer, stream.map_err(|error| star.fail(error))?))
    };
    let peers = (0..own.world_size).filter(|peer| *peer != own.rank);
    let streams = peers.map(connect).collect::<Result<_, DdpError>>()?;
    // Every rank says goodbye to rank 0, which says goodbye when all have.
    let (patience, late) = match own.rank {
        0 => (Duration::ZERO, None),
        _ => {
            star.say_goodbye();
            let late = DdpError::Connect {
                rank: 0,
                address: met.addresses[0].to_string(),
                after: deadline.after,
                problem: "other ranks are not connected yet".into(),
            };
            (rendezvous::PATIENCE, Some(late))
        }
    };
    star.wait_for_goodbyes(deadline.later(patience))
        .map_err(|missing| star.fail(late.unwrap_or_else(|| links.missing(missing))))?;
    drop(star);
    Control::start(own.rank, streams).map_err(failed)
}

impl Job {
    fn unprepared(&self, error: io::Error) -> DdpError {
        self.control
            .fail(DdpError::io("preparing connections", error))
    }

    /// Connects the lanes of a new communicator, in a call of all its members, or as the job begins.
    fn connect(
        &self,
        communicator: u32,
        members: &[usize],
        call: Option<Call>,
        deadline: Deadline,
    ) -> Result<Vec<Vec<TcpStream>>, DdpError> {
        let links = Links {
            own: &self.own,
            met: &self.met,
            call,
            deadline,
        };
        let connect = |peer: usize| -> Result<Vec<TcpStream>, DdpError> {
            if peer == self.own.rank || !members.contains(&peer) {
                return Ok(Vec::new());
            }
            let lanes = 0..self.own.sockets as u32;
            lanes
                .map(|lane| {
                    let interrupted = || self.control.fault().is_some();
                    links.connect(peer, communicator, lane, interrupted)
                })
                .collect()
        };
        let lanes: Result<_, DdpError> = (0..self.own.world_size).map(connect).collect();
        lanes.map_err(|error| self.control.fail(error))
    }
}

/// Makes the connections between ranks. The higher rank calls, the lower rank listens.
struct Links<'a> {
    own: &'a Identity,
    met: &'a Met,
    /// The call that needs them. `None` while the job is being set up.
    call: Option<Call>,
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
        let stream = if peer < self.own.rank {
            let purpose = Purpose::Link { communicator, lane };
            let hello = self.own.hello(purpose, self.met.session);
            let (address, key) = (self.met.addresses[peer], &self.own.key);
            let linked = rendezvous::link(address, key, &hello, self.deadline, interrupted);
            linked.map_err(|problem| match problem {
                Unlinked::NoRoom(error) => error,
                Unlinked::Refused(verdict) => DdpError::Aborted {
                    rank: self.own.rank,
                    reason: format!(
                        "no connection to rank {peer} at {address}: {}",
                        verdict.reason()
                    ),
                },
                Unlinked::Late(problem) => {
                    let why = format!("no connection to it at {address}: {problem}");
                    let unreachable = DdpError::Connect {
                        rank: peer,
                        address: address.to_string(),
                        after: self.deadline.after,
                        problem,
                    };
                    self.late(peer, why, unreachable)
                }
            })?
        } else {
            let acceptor = &self.met.acceptor;
            acceptor
                .wait_link(peer, communicator, lane, self.deadline, interrupted)?
                .ok_or_else(|| {
                    let why = "it did not connect to this rank".into();
                    self.late(peer, why, self.missing(vec![peer]))
                })?
        };
        connection::prepare(&stream)
            .map_err(|error| DdpError::io("preparing a connection", error))?;
        Ok(stream)
    }

    /// The error of a link that was not made in time: `at_start` while the job is being set up. The other end is to blame, as this
    /// one has waited.
    fn late(&self, peer: usize, why: String, at_start: DdpError) -> DdpError {
        match self.call {
            None => at_start,
            Some(call) => DdpError::Timeout {
                ranks: vec![peer],
                call,
                after: self.deadline.after,
                why,
            },
        }
    }

    fn missing(&self, missing: Vec<usize>) -> DdpError {
        DdpError::MissingRanks {
            missing,
            world_size: self.own.world_size,
            after: self.deadline.after,
        }
    }
}

#[cfg(test)]
mod tests;
