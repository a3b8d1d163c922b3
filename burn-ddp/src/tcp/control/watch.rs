//! The thread that watches a job's control plane.

use std::{
    net::TcpStream,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use nix::poll::{PollFd, PollFlags, poll};

use super::{
    HEARTBEAT, Shared, State,
    peer::{Frame, Peer},
};
use crate::DdpError;

/// Reads what the other ranks send, and sends them heartbeats, until `shared.stop` is set.
pub(super) fn watch(shared: &Shared, woken: &UnixStream) {
    let mut beat = Instant::now();
    // Kept apart from the state, so that they are polled without holding its lock.
    let handle = |(rank, peer): (&usize, &Peer)| (*rank, peer.stream.clone());
    let mut open: Vec<(usize, Arc<TcpStream>)> = shared.state().peers.iter().map(handle).collect();
    while !shared.stop.load(Ordering::SeqCst) {
        let mut wanted: Vec<PollFd<'_>> = open
            .iter()
            .map(|(_, stream)| PollFd::new(stream.as_fd(), PollFlags::POLLIN))
            .collect();
        wanted.push(PollFd::new(woken.as_fd(), PollFlags::POLLIN));
        let pause = HEARTBEAT.saturating_sub(beat.elapsed()).as_millis() as u16;
        let looked = Instant::now();
        // Only fails when interrupted, and is repeated soon.
        let polled = poll(&mut wanted, pause).is_ok();
        let mut state = shared.state();
        if polled {
            for ((rank, _), wanted) in open.iter().zip(&wanted) {
                if wanted.any() != Some(false) {
                    hear(shared, &mut state, *rank);
                }
            }
            state.looked = looked;
        }
        if beat.elapsed() >= HEARTBEAT {
            beat = Instant::now();
            let joined = state.joined.iter();
            let all = joined.filter_map(|(id, joined)| Some((*id, joined.doing?)));
            let alive = Frame::Alive(all.collect()).encode().unwrap_or_default();
            for peer in state.peers.values_mut() {
                match peer.unsent.is_empty() {
                    true => peer.push(&alive),
                    // A peer that does not read gets no more heartbeats.
                    false => peer.flush(),
                }
            }
        }
        open.retain(|(rank, _)| !state.peers[rank].closed);
    }
}

/// Handles what one rank has sent.
fn hear(shared: &Shared, state: &mut State, rank: usize) {
    let peer = state.peers.get_mut(&rank).expect("every rank has a peer");
    let frames = peer.read();
    let (mut left, mut fault) = (Vec::new(), None);
    for frame in frames {
        match frame {
            Ok(Frame::Alive(all)) => peer.doing = all,
            Ok(Frame::Left(communicator, calls)) => left.push((communicator, calls)),
            Ok(Frame::Goodbye) => peer.said_goodbye = true,
            Ok(Frame::Abort(told)) => fault = Some(told),
            Err(error) => {
                fault = Some(DdpError::Protocol {
                    rank,
                    problem: format!("a control frame: {error}"),
                })
            }
        }
    }
    if peer.closed && !peer.said_goodbye && fault.is_none() {
        fault = Some(DdpError::RankDied { rank });
    }
    left.retain(|(communicator, _)| state.needs(*communicator));
    if let Some(peer) = state.peers.get_mut(&rank) {
        peer.left.extend(left);
    }
    // Where all ranks only receive, no message would show that their calls differ.
    let fault = fault.or_else(|| {
        let (call, other_call) = state.divergence(rank)?;
        Some(DdpError::Diverged {
            rank: shared.rank,
            call,
            other: rank,
            other_call,
            shapes: None,
        })
    });
    if let Some(fault) = fault {
        shared.fail(state, fault);
    }
}
