//! Connections to other processes, and their options.

use std::{
    io::{self, IoSlice},
    net::{SocketAddr, TcpStream},
    os::fd::AsRawFd,
    time::Duration,
};

use nix::{
    libc::linger,
    sys::socket::{MsgFlags, sendmsg, setsockopt, sockopt},
};

/// How long a connection is silent before the system asks whether the other end is there. Proxies and firewalls between machines forget
/// connections that are silent for some minutes.
const SILENCE: Duration = Duration::from_secs(60);

/// Connects to where another process listens.
///
/// While nobody listens, the system may pick the very port as the connection's own, which is then connected to itself, and has the
/// port. That is an error, and the port is free at once.
pub(super) fn connect(address: &SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    to_another(TcpStream::connect_timeout(address, limit)?)
}

fn to_another(stream: TcpStream) -> io::Result<TcpStream> {
    if stream.local_addr()? != stream.peer_addr()? {
        return Ok(stream);
    }
    // Closed in order, it would keep the port for a minute.
    let at_once = linger {
        l_onoff: 1,
        l_linger: 0,
    };
    setsockopt(&stream, sockopt::Linger, &at_once)?;
    Err(io::ErrorKind::ConnectionRefused.into())
}

/// Prepares a connection for data.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    #[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
    setsockopt(stream, sockopt::TcpKeepIdle, &(SILENCE.as_secs() as u32))?;
    #[cfg(target_vendor = "apple")]
    setsockopt(stream, sockopt::TcpKeepAlive, &(SILENCE.as_secs() as u32))?;
    Ok(())
}

/// Sends as much as it takes, in this order. The end of the other side is an error, and no signal: the standard library's
/// `write_vectored` would end a program that has SIGPIPE as C programs have it.
pub(super) fn send(stream: &TcpStream, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    // There, the standard library has set the socket's own option.
    #[cfg(target_vendor = "apple")]
    let flags = MsgFlags::empty();
    #[cfg(not(target_vendor = "apple"))]
    let flags = MsgFlags::MSG_NOSIGNAL;
    let sent = sendmsg::<()>(stream.as_raw_fd(), parts, &[], flags, None);
    sent.map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::{Ipv4Addr, SocketAddrV4, TcpListener},
        os::fd::{AsRawFd, OwnedFd},
    };

    use nix::sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, getsockname, getsockopt,
        socket,
    };

    use super::*;

    /// A connection of a socket to itself, as the system makes one by chance.
    fn to_itself() -> TcpStream {
        let kind = (AddressFamily::Inet, SockType::Stream, SockFlag::empty());
        let own: OwnedFd = socket(kind.0, kind.1, kind.2, None).unwrap();
        let any = SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));
        bind(own.as_raw_fd(), &any).unwrap();
        let address: SockaddrIn = getsockname(own.as_raw_fd()).unwrap();
        connect(own.as_raw_fd(), &address).unwrap();
        TcpStream::from(own)
    }

    #[test]
    fn a_connection_to_itself_is_none_and_leaves_the_port() {
        let own = to_itself();
        let address = own.local_addr().unwrap();
        assert!(TcpListener::bind(address).is_err());
        let error = to_another(own).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        // Rank 0 listens there now, and is reached.
        let listener = TcpListener::bind(address).unwrap();
        let limit = Duration::from_secs(5);
        let stream = super::connect(&listener.local_addr().unwrap(), limit).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), address);
    }

    #[test]
    fn a_prepared_connection_sends_at_once_and_is_kept_alive() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let stream = super::connect(&address, Duration::from_secs(5)).unwrap();
        prepare(&stream).unwrap();
        assert!(stream.nodelay().unwrap());
        assert!(getsockopt(&stream, sockopt::KeepAlive).unwrap());
        #[cfg(target_os = "linux")]
        assert_eq!(getsockopt(&stream, sockopt::TcpKeepIdle).unwrap(), 60);
    }

    /// A blocked signal waits, even if the program ignores it, as these tests do.
    #[cfg(target_os = "linux")]
    #[test]
    fn the_end_of_the_other_side_is_an_error_and_no_signal() {
        use nix::sys::{
            signal::{SigSet, Signal},
            signalfd::{SfdFlags, SignalFd},
        };
        use std::io::Write;

        let mut pipe = SigSet::empty();
        pipe.add(Signal::SIGPIPE);
        pipe.thread_block().unwrap();
        let signals = SignalFd::with_flags(&pipe, SfdFlags::SFD_NONBLOCK).unwrap();

        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let mut stream = super::connect(&address, Duration::from_secs(5)).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        let parts = [IoSlice::new(b"a head"), IoSlice::new(b" and more")];
        assert_eq!(send(&stream, &parts).unwrap(), 15);
        let mut received = [0; 15];
        other.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"a head and more");
        drop(other);
        // Some may still be taken.
        let ended = (0..1000).find_map(|_| send(&stream, &parts).err());
        assert!(ended.is_some());
        assert!(signals.read_signal().unwrap().is_none());
        // As it comes otherwise.
        assert!(stream.write_vectored(&parts).is_err());
        assert!(signals.read_signal().unwrap().is_some());
        pipe.thread_unblock().unwrap();
    }
}
