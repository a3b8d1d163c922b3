//! Where rank 0 publishes its address, and on which addresses ranks listen.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    path::PathBuf,
};

use crate::DdpError;

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
    pub(super) fn describe(&self) -> String {
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
    pub(in crate::tcp) fn listening_ips(&self, ip: IpAddr) -> Vec<IpAddr> {
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
    pub(super) fn listen(&self, ip: IpAddr, port: u16) -> Result<TcpListener, DdpError> {
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
pub(in crate::tcp) fn takes_both() -> bool {
    match fs::read_to_string("/proc/sys/net/ipv6/bindv6only") {
        Ok(text) => text.trim() == "0",
        Err(_) => cfg!(target_os = "macos"),
    }
}

pub(super) fn bind(address: SocketAddr) -> Result<TcpListener, DdpError> {
    TcpListener::bind(address).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => DdpError::PortInUse { address },
        _ => DdpError::io(format!("listening on {address}"), error),
    })
}
