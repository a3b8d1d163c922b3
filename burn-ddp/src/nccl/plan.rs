//! Plans which NCCL calls make up a call of the group. Only computes addresses and counts, without a device.

use std::ffi::c_int;

use super::wire::{Wire, operator};
use crate::{TensorOp, collective::Collective};

/// One NCCL call. Addresses are on the device. Counts are in items, as [`Wire`] has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    AllReduce {
        from: u64,
        into: u64,
        count: usize,
        op: c_int,
    },
    Reduce {
        from: u64,
        /// Null on ranks other than the root.
        into: u64,
        count: usize,
        op: c_int,
        root: usize,
    },
    Broadcast {
        /// Read on the root only.
        from: u64,
        into: u64,
        count: usize,
        root: usize,
    },
    AllGather {
        from: u64,
        into: u64,
        count: usize,
    },
    ReduceScatter {
        from: u64,
        into: u64,
        /// The number of items in the part of one rank.
        count: usize,
        op: c_int,
    },
    Send {
        from: u64,
        count: usize,
        peer: usize,
    },
    Receive {
        into: u64,
        count: usize,
        peer: usize,
    },
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
    let count = share.count(len);
    if lens.iter().all(|len| *len == 0) {
        return Vec::new();
    }
    let op = match errand {
        Errand::All(op) => op,
        Errand::Send { to } => {
            return vec![Move::Send {
                from,
                count,
                peer: to,
            }];
        }
        Errand::Receive { from } => {
            return vec![Move::Receive {
                into,
                count,
                peer: from,
            }];
        }
    };
    match op {
        TensorOp::AllReduce(op) => vec![Move::AllReduce {
            from,
            into,
            count,
            op: operator(op),
        }],
        TensorOp::Reduce { op, root } => vec![Move::Reduce {
            from,
            into: if rank == root { into } else { 0 },
            count,
            op: operator(op),
            root,
        }],
        TensorOp::Broadcast { root } => vec![Move::Broadcast {
            from: if rank == root { from } else { into },
            into,
            count,
            root,
        }],
        TensorOp::AllGather if lens.iter().all(|other| *other == len) => {
            vec![Move::AllGather { from, into, count }]
        }
        TensorOp::AllGather => uneven_gather(share),
        TensorOp::ReduceScatter(op) => vec![Move::ReduceScatter {
            from,
            into,
            count: share.count(len / ranks),
            op: operator(op),
        }],
        TensorOp::AllToAll => {
            let part = len / ranks;
            let pair = |peer: usize| {
                let count = share.count(part);
                [
                    Move::Send {
                        from: share.at(from, peer * part),
                        count,
                        peer,
                    },
                    Move::Receive {
                        into: share.at(into, peer * part),
                        count,
                        peer,
                    },
                ]
            };
            (0..ranks).flat_map(pair).collect()
        }
    }
}

/// NCCL only gathers parts of the same size. For others, each rank broadcasts its own part.
fn uneven_gather(share: &Share<'_>) -> Vec<Move> {
    let mut place = share.into;
    let mut moves = Vec::new();
    for (root, len) in share.lens.iter().enumerate() {
        if *len > 0 {
            moves.push(Move::Broadcast {
                from: if root == share.rank {
                    share.from
                } else {
                    place
                },
                into: place,
                count: share.count(*len),
                root,
            });
        }
        place = share.at(place, *len);
    }
    moves
}

#[cfg(test)]
mod tests;
