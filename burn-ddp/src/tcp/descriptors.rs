//! File descriptors: each connection takes one, and a process may have so many (`ulimit -n`).

use std::io;

use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};

use crate::DdpError;

/// What a program has of its own: files, devices, data loaders.
const OTHERS: u64 = 1024;
/// Communicators that a program may have without thinking of it.
const COMMUNICATORS: u64 = 16;

/// Makes room for the connections of a rank, as far as the system lets a process do that by itself.
pub(super) fn make_room(world_size: usize, sockets: usize) {
    let wanted = OTHERS + COMMUNICATORS * (world_size * sockets) as u64;
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < wanted.min(hard)
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, wanted.min(hard), hard)
    {
        log::debug!("burn-ddp: no room for more file descriptors: {error}");
    }
}

/// Whether a process has as many as it may have, or the system has.
pub(super) fn are_used_up(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw);
    matches!(code, Some(Errno::EMFILE | Errno::ENFILE))
}

/// The error of a connection that cannot be made for want of one.
pub(super) fn used_up(error: io::Error) -> DdpError {
    let context = "connecting the ranks, of which each connection takes a file descriptor \
                   (raise the limit: `ulimit -n`)";
    DdpError::io(context, error)
}
