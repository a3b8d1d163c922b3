//! File descriptors: each connection takes one, and their number is limited for each process (`ulimit -n`).

use std::io;

use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};

use crate::DdpError;

/// File descriptors that are left for the program itself: for files, devices, data loaders.
const OTHERS: u64 = 1024;
/// The number of communicators for which there is room.
const COMMUNICATORS: u64 = 16;

/// Raises the limit on file descriptors for the connections of a rank, as far as the hard limit allows.
pub(super) fn make_room(world_size: usize, sockets: usize) {
    let wanted = OTHERS + COMMUNICATORS * (world_size * sockets) as u64;
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < wanted.min(hard)
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, wanted.min(hard), hard)
    {
        log::debug!("burn-ddp: no room for more file descriptors: {error}");
    }
}

/// Whether the error means that the process or the system has reached its limit on file descriptors.
pub(super) fn are_used_up(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw);
    matches!(code, Some(Errno::EMFILE | Errno::ENFILE))
}

/// The error of a connection that cannot be made because there is no file descriptor left.
pub(super) fn used_up(error: io::Error) -> DdpError {
    let context = "connecting the ranks, of which each connection takes a file descriptor \
                   (raise the limit: `ulimit -n`)";
    DdpError::io(context, error)
}
