//! Rank 0, where the others register.

use std::{
    collections::HashMap,
    fs,
    io::Write,
    net::{Ipv4Addr, TcpListener},
    path::Path,
};

use super::{
    Met,
    place::{Place, bind},
    table::{Endpoint, Table, tell},
};
use crate::{
    DdpError,
    tcp::{
        acceptor::Acceptor, handshake::Identity, resolve::resolve_in_time, torch_store::TorchStore,
    },
    transport::Deadline,
};

pub(super) fn host(place: &Place, own: &Identity, deadline: Deadline) -> Result<Met, DdpError> {
    let world_size = own.world_size;
    let listener = match place {
        Place::Address { host, port, .. } => bind_one(place, host, *port, *port, deadline)?,
        Place::File(_) => bind((Ipv4Addr::LOCALHOST, 0).into())?,
        Place::TorchStore { host, port, .. } => bind_one(place, host, *port, 0, deadline)?,
    };
    let io = |error| DdpError::io("listening for the other ranks", error);
    let address = listener.local_addr().map_err(io)?;
    let acceptor = Acceptor::start(listener, own.clone()).map_err(io)?;
    match place {
        Place::Address { .. } => {}
        Place::File(path) => publish(path, &address.to_string())?,
        Place::TorchStore {
            host, port, prefix, ..
        } => {
            // The port suffices, because the others have the name by which they reach this machine.
            TorchStore::connect(host, *port, deadline)?
                .set(&format!("{prefix}/port"), &address.port().to_string())?;
        }
    }

    let arrived = acceptor.wait_registered(deadline);
    if let Place::File(path) = place {
        // Fails if someone else has already removed it.
        let _ = fs::remove_file(path);
    }
    let arrived = arrived.inspect_err(|error| {
        for registered in acceptor.take_registered().into_values() {
            // The ranks that came are told which are missing.
            let _ = tell(&registered.stream, &Err(error.clone()));
        }
    })?;

    let session = rand::random_range(1..u64::MAX);
    acceptor.set_session(session);
    let mut endpoints = vec![
        Endpoint {
            ip: None,
            port: acceptor.port()
        };
        world_size
    ];
    for (rank, registered) in &arrived {
        let ip = registered.address.ip().to_canonical();
        endpoints[*rank] = Endpoint {
            ip: (!ip.is_loopback()).then_some(ip),
            port: registered.port,
        };
    }
    let table = Ok(Table { session, endpoints });
    let mut star = HashMap::new();
    for (rank, registered) in arrived {
        // Fails when the rank has died, which the control plane soon notices by the same connection.
        let _ = tell(&registered.stream, &table);
        star.insert(rank, registered.stream);
    }
    Ok(Met {
        acceptor,
        session,
        addresses: vec![address; world_size],
        star,
    })
}

/// Writes a file in the same folder and renames it to `path`, so that no reader sees a part of it.
fn publish(path: &Path, text: &str) -> Result<(), DdpError> {
    let context = || format!("publishing the master's address in {}", path.display());
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut file =
        tempfile::NamedTempFile::new_in(folder).map_err(|error| DdpError::io(context(), error))?;
    file.write_all(text.as_bytes())
        .map_err(|error| DdpError::io(context(), error))?;
    file.persist(path)
        .map_err(|error| DdpError::io(context(), error.error))?;
    Ok(())
}

/// Listens where the others will look for the master, on the first of the host's addresses that works.
fn bind_one(
    place: &Place,
    host: &str,
    known: u16,
    port: u16,
    deadline: Deadline,
) -> Result<TcpListener, DdpError> {
    let mut last = None;
    for address in resolve_in_time(host, known, deadline)? {
        match place.listen(address.ip(), port) {
            Err(error @ DdpError::PortInUse { .. }) => return Err(error),
            Err(error) => last = Some(error),
            bound => return bound,
        }
    }
    Err(last.expect("a host has one address at least"))
}
