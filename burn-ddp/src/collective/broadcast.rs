//! Broadcast, reduce and barrier.

use super::{Collective, all_reduce::divide};
use crate::{
    DdpError, Element, ReduceOp,
    transport::{Incoming, Outgoing},
};

/// From this many bytes on, and with more than two ranks, a broadcast is a scatter and an all-gather around a ring.
const SCATTERED: usize = 512 << 10;

impl Collective<'_> {
    pub(crate) fn broadcast<T: Element>(
        &self,
        data: &mut [T],
        root: usize,
    ) -> Result<(), DdpError> {
        match self.world_size > 2 && size_of_val(data) >= SCATTERED {
            true => self.broadcast_scattered(data, root),
            false => self.broadcast_tree(data, root),
        }
    }

    /// A binomial tree: in each step, every rank that has the data passes it on.
    pub(super) fn broadcast_tree<T: Element>(
        &self,
        data: &mut [T],
        root: usize,
    ) -> Result<(), DdpError> {
        let distance = (self.rank + self.world_size - root) % self.world_size;
        let rank = |distance: usize| (root + distance) % self.world_size;
        if distance > 0 {
            let parent = distance & (distance - 1);
            self.exchange(vec![], vec![Incoming::copy(rank(parent), data)])?;
        }
        for child in self.children(distance).rev() {
            self.exchange(vec![Outgoing::new(rank(child), data)], vec![])?;
        }
        Ok(())
    }

    /// The same tree in the other direction: parents combine the data of their children.
    pub(super) fn reduce_tree<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<(), DdpError> {
        let distance = (self.rank + self.world_size - root) % self.world_size;
        let rank = |distance: usize| (root + distance) % self.world_size;
        for child in self.children(distance) {
            self.exchange(vec![], vec![Incoming::fold(rank(child), op, data)])?;
        }
        if distance > 0 {
            let parent = distance & (distance - 1);
            self.exchange(vec![Outgoing::new(rank(parent), data)], vec![])?;
        }
        Ok(())
    }

    /// The children of a node of the binomial tree over 0..N, nearest first.
    fn children(&self, node: usize) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let world_size = self.world_size;
        let bits = match node {
            0 => usize::BITS,
            node => node.trailing_zeros(),
        };
        let bits = bits.min(world_size.next_power_of_two().trailing_zeros());
        (0..bits)
            .map(move |bit| node + (1 << bit))
            .filter(move |child| *child < world_size)
    }

    /// Scatter, then all-gather around the ring (van de Geijn): each rank sends at most twice the data.
    fn broadcast_scattered<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), DdpError> {
        let own = self.chunk(data.len(), self.rank);
        if self.rank == root {
            let outgoing = self
                .peers()
                .map(|peer| Outgoing::new(peer, &data[self.chunk(data.len(), peer)]))
                .collect();
            self.exchange(outgoing, vec![])?;
        } else {
            self.exchange(vec![], vec![Incoming::copy(root, &mut data[own])])?;
        }
        self.all_gather_ring(data, self.rank)
    }

    /// Reduces the data at the root. The other ranks' data are unchanged.
    pub(crate) fn reduce<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<(), DdpError> {
        let mut sum: Vec<T::Accumulator> = data.iter().map(|value| value.widen()).collect();
        self.reduce_tree(&mut sum, op, root)?;
        if self.rank == root {
            if op == ReduceOp::Mean {
                divide(&mut sum, self.world_size);
            }
            for (into, value) in data.iter_mut().zip(sum) {
                *into = T::narrow(value);
            }
        }
        Ok(())
    }

    /// A dissemination barrier (Hensgen, Finkel and Manber 1988): ceil(log2 N) steps.
    pub(crate) fn barrier(&self) -> Result<(), DdpError> {
        let mut distance = 1;
        while distance < self.world_size {
            self.exchange(
                vec![Outgoing::new::<u8>(self.after(distance), &[])],
                vec![Incoming::copy::<u8>(self.before(distance), &mut [])],
            )?;
            distance *= 2;
        }
        Ok(())
    }
}
