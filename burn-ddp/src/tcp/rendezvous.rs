//! How the ranks find each other: rank 0 publishes where it listens, the others register there,
//! and get the table of all addresses.

use std::{
    collections::HashMap,
    fs,
    io::{self, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    acceptor::Acceptor,
    connection, descriptors,
    handshake::{self, Failure, HANDSHAKE, Hello, Identity, Key, Purpose, Verdict},
    resolve::{resolve, resolve_in_time},
    torch_store::TorchStore,
};
use crate::{DdpError, transport::Deadline};

/// How much longer than its own time limit a rank waits for what rank 0 sends at the end of rank 0's limit.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Where rank 0 publishes its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Rank 0 listens right there.
    Address {
        host: String,
        port: u16,
        /// Whether all ranks are certainly on one machine.
        local: bool,
    },
    /// A file that all ranks see, which are on one machine. Rank 0 listens on a port of its own choice.
    File(PathBuf),
    /// The store that torchrun's agent serves on rank 0's machine, and the prefix of our keys there. Rank
    /// 0 listens on a port of its own choice.
    TorchStore {
        host: String,
        port: u16,
        prefix: String,
        /// Whether all ranks are certainly on one machine.
        local: bool,
    },
}

impl Place {
    fn describe(&self) -> String {
        match self {
            Self::Address { host, port, .. } => format!("{host}:{port}"),
            Self::File(path) => format!("(address read from {})", path.display()),
            Self::TorchStore { host, port, .. } => {
                format!("(address read from torchrun's store at {host}:{port})")
            }
        }
    }

    fn is_local(&self) -> bool {
        match self {
            Self::File(_) => true,
            Self::Address { local, .. } | Self::TorchStore { local, .. } => *local,
        }
    }

    /// The addresses on which a rank may listen, the best first, if it reaches the master's machine at `ip`.
    pub(super) fn listening_ips(&self, ip: IpAddr) -> Vec<IpAddr> {
        let [all_v4, all_v6] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        match ip {
            ip if ip.is_loopback() && self.is_local() => vec![ip],
            // How the other machines reach this one does not follow from its own name for itself.
            ip if ip.is_loopback() && takes_both() => vec![all_v6, all_v4],
            IpAddr::V4(_) => vec![all_v4],
            IpAddr::V6(_) => vec![all_v6],
        }
    }

    /// Listens on the first of these that works.
    fn listen(&self, ip: IpAddr, port: u16) -> Result<TcpListener, DdpError> {
        let mut last = None;
        for ip in self.listening_ips(ip) {
            match bind(SocketAddr::new(ip, port)) {
                // The others would reach the program that has the port.
                Err(error) if !matches!(error, DdpError::PortInUse { .. }) => last = Some(error),
                done => return done,
            }
        }
        Err(last.expect("there is one address at least"))
    }
}

/// Whether who listens on all IPv6 addresses is reached by IPv4 too.
pub(super) fn takes_both() -> bool {
    match fs::read_to_string("/proc/sys/net/ipv6/bindv6only") {
        Ok(text) => text.trim() == "0",
        Err(_) => cfg!(target_os = "macos"),
    }
}

/// Where a rank listens. Without `ip`, it is on the master's machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Endpoint {
    ip: Option<IpAddr>,
    port: u16,
}

impl Endpoint {
    /// Its address for a rank that reaches the master at `master`. A link-local address gets the scope of the master's, because
    /// it is on the same link.
    fn seen_from(&self, master: SocketAddr) -> SocketAddr {
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
struct Table {
    session: u64,
    endpoints: Vec<Endpoint>,
}

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

fn host(place: &Place, own: &Identity, deadline: Deadline) -> Result<Met, DdpError> {
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

fn join(place: &Place, own: &Identity, deadline: Deadline) -> Result<Met, DdpError> {
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

enum Attempt {
    Again(String),
    Failed(DdpError),
}

/// Registers at the first of the master's addresses that answers.
fn register_at_one(
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
fn register(
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

/// Why a link could not be made.
#[derive(Debug)]
pub(crate) enum Unlinked {
    /// There is no file descriptor left for it.
    NoRoom(DdpError),
    /// The other side refuses it.
    Refused(Verdict),
    /// The time is over, or the group has a fault. The problem of the last attempt.
    Late(String),
}

/// Makes a link to a rank that already has the table, or will have it soon. A rank that has too many callers,
/// or cannot be reached just now, is called again until the time is over or the group has a fault.
pub(crate) fn link(
    address: SocketAddr,
    key: &Key,
    hello: &Hello,
    deadline: Deadline,
    interrupted: impl Fn() -> bool,
) -> Result<TcpStream, Unlinked> {
    let mut pause = Duration::from_millis(5);
    let mut problem = String::from("it took too long");
    loop {
        let Some(left) = deadline.left().filter(|_| !interrupted()) else {
            return Err(Unlinked::Late(problem));
        };
        let connected = match connection::connect(&address, left.min(HANDSHAKE)) {
            Err(error) if descriptors::are_used_up(&error) => {
                return Err(Unlinked::NoRoom(descriptors::used_up(error)));
            }
            connected => connected,
        };
        let attempt = connected
            .map_err(Failure::from)
            .and_then(|stream| handshake::call(&stream, key, hello, deadline.at).map(|()| stream));
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(Failure::Refused(Verdict::Session)) => {}
            Err(Failure::Refused(verdict)) => return Err(Unlinked::Refused(verdict)),
            Err(Failure::Stranger(reason)) => problem = reason,
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

fn tell(stream: &TcpStream, table: &Result<Table, DdpError>) -> io::Result<()> {
    let text = serde_json::to_vec(table)?;
    let mut message = (text.len() as u32).to_le_bytes().to_vec();
    message.extend_from_slice(&text);
    handshake::write_all(stream, &message, Instant::now() + HANDSHAKE)
}

fn hear(stream: &TcpStream, deadline: Instant) -> io::Result<Result<Table, DdpError>> {
    let mut length = [0; 4];
    handshake::read_exact(stream, &mut length, deadline)?;
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    handshake::read_exact(stream, &mut text, deadline)?;
    Ok(serde_json::from_slice(&text)?)
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

fn bind(address: SocketAddr) -> Result<TcpListener, DdpError> {
    TcpListener::bind(address).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => DdpError::PortInUse { address },
        _ => DdpError::io(format!("listening on {address}"), error),
    })
}

#[cfg(test)]
mod tests;
