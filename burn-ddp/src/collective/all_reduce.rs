//! All-reduce: direct for small messages, a tree for small ones of many ranks, a ring for large
//! ones; 16-bit floats are scattered directly, so that each is rounded once.

use super::Collective;
use crate::{
    DdpError, Element, ReduceOp,
    element::combine_slices,
    transport::{Incoming, Outgoing},
};

/// Up to this many bytes to receive, every rank sends everything to everyone: one step.
const DIRECT: usize = 64 << 10;
/// More ranks than these do not talk to everyone for a small message.
const DIRECT_RANKS: usize = 16;
/// Up to this many bytes, a tree's few steps beat a ring's bandwidth.
const TREE: usize = 64 << 10;

/// The ways to all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Direct,
    Tree,
    Ring,
}

impl Way {
    /// That of so many bytes, of elements that are summed in their own type.
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

    /// Everyone gets everything and reduces it in the order of the ranks.
    fn all_reduce_direct<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), DdpError> {
        let all = self.all_gather_direct(data)?;
        if !data.is_empty() {
            reduce_rows(&all, op, self.world_size, data);
        }
        Ok(())
    }

    /// Every rank gets one chunk of all ranks, reduces it, and passes the result around.
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

    /// Reduce-scatter around the ring, then all-gather around the ring: each rank sends
    /// 2 (N - 1) / N of the data, which is the least possible (Patarasuk and Yuan 2009).
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

    /// Passes the chunks around until everyone has them all; `own` is the one this rank has.
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

/// Reduces the rows of `all`, one of each rank, in the ranks' order and in the accumulator's type.
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
