//! All-reduce: direct for small messages, a tree for small messages between many ranks, a ring for large ones.
//! 16-bit floats that do not go directly are scattered, so that each sum is rounded only once.

use super::Collective;
use crate::{
    DdpError, Element, ReduceOp,
    element::combine_slices,
    transport::{Incoming, Outgoing},
};

/// If a rank receives at most this many bytes, every rank sends its data to all others, in one step.
const DIRECT: usize = 64 << 10;
/// With more ranks than this, even small messages are not sent directly.
const DIRECT_RANKS: usize = 16;
/// Up to this many bytes, the few steps of a tree are faster than a ring with its higher bandwidth.
const TREE: usize = 64 << 10;

/// The ways to all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Direct,
    Tree,
    Ring,
}

impl Way {
    /// The way for `bytes` of elements that are summed in their own type.
    pub(crate) fn of(ranks: usize, bytes: usize) -> Self {
        if ranks <= DIRECT_RANKS && bytes * (ranks - 1) <= DIRECT {
            Self::Direct
        } else if bytes <= TREE {
            Self::Tree
        } else {
            Self::Ring
        }
    }
}

impl Collective<'_> {
    pub(crate) fn all_reduce<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), DdpError> {
        match Way::of(self.world_size, size_of_val(data)) {
            Way::Direct => self.all_reduce_direct(data, op),
            _ if T::TYPE != <T::Accumulator as Element>::TYPE => {
                self.all_reduce_scattered(data, op)
            }
            Way::Tree => {
                self.reduce_tree(data, op, 0)?;
                if op == ReduceOp::Mean && self.rank == 0 {
                    divide(data, self.world_size);
                }
                self.broadcast_tree(data, 0)
            }
            Way::Ring => self.all_reduce_ring(data, op),
        }
    }

    /// Every rank gets the data of all ranks, and reduces them in rank order.
    fn all_reduce_direct<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), DdpError> {
        let all = self.all_gather_direct(data)?;
        if !data.is_empty() {
            reduce_rows(&all, op, self.world_size, data);
        }
        Ok(())
    }

    /// Every rank gets one chunk from all ranks, reduces it, and passes the result around the ring.
    fn all_reduce_scattered<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), DdpError> {
        let own = self.chunk(data.len(), self.rank);
        let mut all = vec![T::zeroed(); own.len() * self.world_size];
        let width = own.len();
        self.scatter_chunks(data, &mut all, width)?;
        if width > 0 {
            reduce_rows(&all, op, self.world_size, &mut data[own]);
        }
        self.all_gather_ring(data, self.rank)
    }

    /// Reduce-scatter around the ring, then all-gather around the ring: each rank sends 2 (N - 1) / N of the
    /// data, the minimum (Patarasuk and Yuan 2009).
    fn all_reduce_ring<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), DdpError> {
        let (next, previous) = (self.after(1), self.before(1));
        for step in 0..self.world_size - 1 {
            let send = self.chunk(data.len(), self.before(step));
            let receive = self.chunk(data.len(), self.before(step + 1));
            let [send, receive] = data
                .get_disjoint_mut([send, receive])
                .expect("neighbouring chunks do not overlap");
            self.exchange(
                vec![Outgoing::new(next, send)],
                vec![Incoming::fold(previous, op, receive)],
            )?;
        }
        if op == ReduceOp::Mean {
            let own = self.chunk(data.len(), self.after(1));
            divide(&mut data[own], self.world_size);
        }
        self.all_gather_ring(data, self.after(1))
    }

    /// Passes the chunks around the ring until every rank has all; `own` is the chunk that this rank starts with.
    pub(super) fn all_gather_ring<T: Element>(
        &self,
        data: &mut [T],
        own: usize,
    ) -> Result<(), DdpError> {
        let (next, previous) = (self.after(1), self.before(1));
        let len = data.len();
        for step in 0..self.world_size - 1 {
            let chunk = |back: usize| self.chunk(len, own + self.world_size - back);
            let [send, receive] = data
                .get_disjoint_mut([chunk(step), chunk(step + 1)])
                .expect("neighbouring chunks do not overlap");
            self.exchange(
                vec![Outgoing::new(next, send)],
                vec![Incoming::copy(previous, receive)],
            )?;
        }
        Ok(())
    }
}

pub(super) fn divide<T: Element>(data: &mut [T], ranks: usize) {
    for value in data {
        *value = value.divide(ranks);
    }
}

/// Reduces the rows of `all`, one for each rank, in rank order and in the accumulator's type.
pub(super) fn reduce_rows<T: Element>(all: &[T], op: ReduceOp, ranks: usize, into: &mut [T]) {
    let width = into.len();
    let mut rows = all.chunks_exact(width);
    let mut sum: Vec<T::Accumulator> = rows
        .next()
        .into_iter()
        .flatten()
        .map(|value| value.widen())
        .collect();
    for row in rows {
        let row: Vec<T::Accumulator> = row.iter().map(|value| value.widen()).collect();
        combine_slices(op, &mut sum, &row);
    }
    if op == ReduceOp::Mean {
        divide(&mut sum, ranks);
    }
    for (into, value) in into.iter_mut().zip(sum) {
        *into = T::narrow(value);
    }
}
