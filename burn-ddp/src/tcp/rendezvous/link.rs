//! A link from one rank to another, once they know each other's addresses.

use std::{
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use crate::{
    DdpError,
    tcp::{
        connection, descriptors,
        handshake::{self, Failure, HANDSHAKE, Hello, Key, Verdict},
    },
    transport::Deadline,
};

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
