//! Plans which NCCL calls make up a call of the group. Only computes addresses and counts, without a device.

use std::ffi::c_int;

use super::wire::{Wire, operator};
use crate::{TensorOp, collective::Collective};

/// What an NCCL call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Send,
    Receive,
}

/// One NCCL call. Addresses are on the device. Counts are in items, as [`Wire`] has them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub(super) kind: Kind,
    /// Where this rank's elements are. A receive has none, nor has a broadcast, except on the root.
    pub(super) from: u64,
    /// Where the result goes. A send has none. Null in a reduction to another rank.
    pub(super) into: u64,
    /// The number of items. In a reduce-scatter, those in the part of one rank.
    pub(super) count: usize,
    /// The `ncclRedOp_t`, or 0 if nothing is reduced.
    pub(super) op: c_int,
    /// The root, or the other rank of a message; else 0.
    pub(super) peer: usize,
}

/// What a rank does in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Errand {
    /// All ranks make this call.
    All(TensorOp),
    Send {
        to: usize,
    },
    Receive {
        from: usize,
    },
}

impl Errand {
    /// The ranks that this rank depends on to end the call.
    pub(super) fn waits_for(self, call: &Collective<'_>) -> Vec<usize> {
        match self {
            Self::All(_) => call.peers().collect(),
            Self::Send { to: peer } | Self::Receive { from: peer } => vec![peer],
        }
    }

    /// Whether the result of this rank is its own tensor, so that no other is needed.
    pub(crate) fn stays(self, rank: usize) -> bool {
        match self {
            Self::All(TensorOp::Broadcast { root }) => root == rank,
            Self::All(TensorOp::Reduce { root, .. }) => root != rank,
            Self::Send { .. } => true,
            _ => false,
        }
    }
}

/// One rank's part in a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share<'a> {
    pub(super) rank: usize,
    /// The number of elements of each rank. It may differ between ranks in an all-gather only.
    pub(super) lens: &'a [usize],
    /// Where this rank's elements are.
    pub(super) from: u64,
    /// Where the result goes.
    pub(super) into: u64,
    pub(super) wire: Wire,
}

impl Share<'_> {
    fn count(&self, elements: usize) -> usize {
        elements * self.wire.items
    }

    /// The address of the element `elements` positions after `address`.
    fn at(&self, address: u64, elements: usize) -> u64 {
        address + self.wire.bytes(elements) as u64
    }
}

/// The NCCL calls to make, as one group. Empty if there are no elements to move.
pub(super) fn moves(errand: Errand, share: &Share<'_>) -> Vec<Move> {
    let Share {
        rank,
        lens,
        from,
        into,
        ..
    } = *share;
    let (len, ranks) = (lens[rank], lens.len());
    if lens.iter().all(|len| *len == 0) {
        return Vec::new();
    }
    let elements = match errand {
        Errand::All(TensorOp::ReduceScatter(_) | TensorOp::AllToAll) => len / ranks,
        _ => len,
    };
    let call = |kind, from, into, op, peer| Move {
        kind,
        from,
        into,
        count: share.count(elements),
        op,
        peer,
    };
    let op = match errand {
        Errand::All(op) => op,
        Errand::Send { to } => return vec![call(Kind::Send, from, 0, 0, to)],
        Errand::Receive { from } => return vec![call(Kind::Receive, 0, into, 0, from)],
    };
    vec![match op {
        TensorOp::AllReduce(op) => call(Kind::AllReduce, from, into, operator(op), 0),
        TensorOp::Reduce { op, root } => {
            let into = if rank == root { into } else { 0 };
            call(Kind::Reduce, from, into, operator(op), root)
        }
        TensorOp::Broadcast { root } => {
            let from = if rank == root { from } else { into };
            call(Kind::Broadcast, from, into, 0, root)
        }
        TensorOp::AllGather if lens.iter().all(|other| *other == len) => {
            call(Kind::AllGather, from, into, 0, 0)
        }
        TensorOp::AllGather => return uneven_gather(share),
        TensorOp::ReduceScatter(op) => call(Kind::ReduceScatter, from, into, operator(op), 0),
        TensorOp::AllToAll => {
            let pair = |peer: usize| {
                let [from, into] = [from, into].map(|start| share.at(start, peer * elements));
                let sent = call(Kind::Send, from, 0, 0, peer);
                [sent, call(Kind::Receive, 0, into, 0, peer)]
            };
            return (0..ranks).flat_map(pair).collect();
        }
    }]
}

/// NCCL only gathers parts of the same size. For others, each rank broadcasts its own part.
fn uneven_gather(share: &Share<'_>) -> Vec<Move> {
    let mut place = share.into;
    let mut moves = Vec::new();
    for (root, len) in share.lens.iter().enumerate() {
        if *len > 0 {
            let own = root == share.rank;
            moves.push(Move {
                kind: Kind::Broadcast,
                from: if own { share.from } else { place },
                into: place,
                count: share.count(*len),
                op: 0,
                peer: root,
            });
        }
        place = share.at(place, *len);
    }
    moves
}
