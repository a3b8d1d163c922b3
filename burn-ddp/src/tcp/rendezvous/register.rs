//! The other ranks, which look for rank 0 and register there.

use std::{
    fs, io,
    net::{SocketAddr, TcpStream},
    str::FromStr,
    thread,
    time::Duration,
};

use super::{
    Met, PATIENCE, Place,
    table::{Table, hear},
};
use crate::{
    DdpError,
    tcp::{
        acceptor::Acceptor,
        connection, descriptors,
        handshake::{self, Failure, Identity, Purpose, Verdict},
        resolve::resolve,
        torch_store::TorchStore,
    },
    transport::Deadline,
};

pub(super) fn join(place: &Place, own: &Identity, deadline: Deadline) -> Result<Met, DdpError> {
    let mut acceptor: Option<Acceptor> = None;
    let mut pause = Duration::from_millis(10);
    let mut problem = String::from("nothing was published there");
    loop {
        if deadline.left().is_none() {
            return Err(DdpError::Connect {
                rank: 0,
                address: place.describe(),
                after: deadline.after,
                problem,
            });
        }
        let registered = locate(place, deadline)
            .and_then(|addresses| register_at_one(addresses, place, &mut acceptor, own, deadline));
        match registered {
            Ok((address, table, stream)) => {
                let acceptor = acceptor.expect("it was started to register");
                acceptor.set_session(table.session);
                let addresses = table
                    .endpoints
                    .iter()
                    .map(|end| end.seen_from(address))
                    .collect();
                return Ok(Met {
                    acceptor,
                    session: table.session,
                    addresses,
                    star: [(0, stream)].into(),
                });
            }
            Err(Attempt::Again(reason)) => problem = reason,
            Err(Attempt::Failed(error)) => return Err(error),
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(300));
    }
}

pub(super) enum Attempt {
    Again(String),
    Failed(DdpError),
}

/// Registers at the first of the master's addresses that answers.
pub(super) fn register_at_one(
    addresses: Vec<SocketAddr>,
    place: &Place,
    acceptor: &mut Option<Acceptor>,
    own: &Identity,
    deadline: Deadline,
) -> Result<(SocketAddr, Table, TcpStream), Attempt> {
    let mut problems = Vec::new();
    for address in addresses {
        match register(address, acceptor, place, own, deadline) {
            Ok((table, stream)) => return Ok((address, table, stream)),
            Err(Attempt::Again(reason)) => problems.push(format!("{address}: {reason}")),
            failed => failed.map(drop)?,
        }
    }
    Err(Attempt::Again(problems.join("; ")))
}

/// The addresses at which the master may be.
fn locate(place: &Place, deadline: Deadline) -> Result<Vec<SocketAddr>, Attempt> {
    match place {
        Place::Address { host, port, .. } => resolve(host, *port, deadline).map_err(Attempt::Again),
        Place::File(path) => match fs::read_to_string(path) {
            Ok(text) => Ok(vec![parse(&text, "address")?]),
            Err(error) => Err(Attempt::Again(error.to_string())),
        },
        Place::TorchStore {
            host, port, prefix, ..
        } => {
            let mut store = TorchStore::connect(host, *port, deadline).map_err(Attempt::Failed)?;
            match store
                .get(&format!("{prefix}/port"))
                .map_err(Attempt::Failed)?
            {
                Some(text) => {
                    let port = parse(&text, "port")?;
                    resolve(host, port, deadline).map_err(Attempt::Again)
                }
                None => Err(Attempt::Again("rank 0 has published nothing yet".into())),
            }
        }
    }
}

fn parse<T: FromStr>(text: &str, what: &str) -> Result<T, Attempt> {
    let text = text.trim();
    let parsed = text.parse();
    parsed.map_err(|_| Attempt::Again(format!("`{text}` is no {what}")))
}

/// Registers at the master, and returns the table and the connection that it came over.
pub(super) fn register(
    master: SocketAddr,
    acceptor: &mut Option<Acceptor>,
    place: &Place,
    own: &Identity,
    deadline: Deadline,
) -> Result<(Table, TcpStream), Attempt> {
    let again = |error: io::Error| match descriptors::are_used_up(&error) {
        true => Attempt::Failed(descriptors::used_up(error)),
        false => Attempt::Again(error.to_string()),
    };
    let failed = |error| Attempt::Failed(DdpError::io("listening for the other ranks", error));
    let limit = handshake::limit_to_connect(deadline);
    let stream = connection::connect(&master, limit).map_err(again)?;
    if acceptor.is_none() {
        let listener = place.listen(master.ip(), 0).map_err(Attempt::Failed)?;
        *acceptor = Some(Acceptor::start(listener, own.clone()).map_err(failed)?);
    }
    let port = acceptor.as_ref().map_or(0, Acceptor::port);
    let hello = own.hello(Purpose::Register { port }, 0);
    match handshake::call(&stream, &own.key, &hello, deadline.at) {
        Ok(()) => {}
        Err(Failure::Stranger(problem)) => return Err(Attempt::Again(problem)),
        // The job there may end, and this rank's job begin in its place.
        Err(Failure::Refused(verdict @ Verdict::Begun)) => {
            return Err(Attempt::Again(verdict.reason().into()));
        }
        Err(Failure::Refused(verdict)) => {
            return Err(Attempt::Failed(DdpError::Refused {
                rank: own.rank,
                reason: verdict.reason().into(),
            }));
        }
    }
    // The master answers when all ranks have come, or when its own time is over.
    let table = hear(&stream, deadline.later(PATIENCE).at)
        .map_err(|error| Attempt::Again(format!("the master broke off: {error}")))?;
    table.map(|table| (table, stream)).map_err(Attempt::Failed)
}
