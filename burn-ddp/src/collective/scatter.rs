//! Reduce-scatter, all-to-all, and messages between two ranks.

use super::{Collective, all_reduce::reduce_rows};
use crate::{
    Call, DdpError, Element, ReduceOp,
    transport::{Incoming, Outgoing},
};

impl Collective<'_> {
    /// Sends every rank its chunk of `data`. `rows` receives this rank's chunk from each rank, in rank order;
    /// each chunk is `width` long.
    pub(super) fn scatter_chunks<T: Element>(
        &self,
        data: &[T],
        rows: &mut [T],
        width: usize,
    ) -> Result<(), DdpError> {
        let outgoing = self
            .peers()
            .map(|peer| Outgoing::new(peer, &data[self.chunk(data.len(), peer)]))
            .collect();
        let mut incoming = Vec::with_capacity(self.world_size);
        let mut rest = rows;
        for peer in 0..self.world_size {
            let (row, after) = rest.split_at_mut(width);
            rest = after;
            match peer == self.rank {
                true => row.copy_from_slice(&data[self.chunk(data.len(), peer)]),
                false => incoming.push(Incoming::copy(peer, row)),
            }
        }
        self.exchange(outgoing, incoming)
    }

    /// Reduces the data of all ranks; each rank gets its part of the result.
    pub(crate) fn reduce_scatter<T: Element>(
        &self,
        data: &[T],
        op: ReduceOp,
    ) -> Result<Vec<T>, DdpError> {
        let width = data.len() / self.world_size;
        let rows = self.all_to_all(data)?;
        let mut own = vec![T::zeroed(); width];
        if width > 0 {
            reduce_rows(&rows, op, self.world_size, &mut own);
        }
        Ok(own)
    }

    /// Sends part `i` of this rank's data to rank `i`.
    pub(crate) fn all_to_all<T: Element>(&self, data: &[T]) -> Result<Vec<T>, DdpError> {
        let mut rows = vec![T::zeroed(); data.len()];
        self.scatter_chunks(data, &mut rows, data.len() / self.world_size)?;
        Ok(rows)
    }

    pub(crate) fn send<T: Element>(&self, data: &[T], to: usize) -> Result<(), DdpError> {
        self.exchange(vec![Outgoing::new(to, data)], vec![])
    }

    /// Sends and receives at the same time; `theirs` is the call of the received message.
    pub(crate) fn send_receive<T: Element>(
        &self,
        data: &[T],
        to: usize,
        into: &mut [T],
        from: usize,
        theirs: Call,
    ) -> Result<(), DdpError> {
        let incoming = Incoming {
            call: Some(theirs),
            ..Incoming::copy(from, into)
        };
        self.exchange(vec![Outgoing::new(to, data)], vec![incoming])
    }

    pub(crate) fn receive<T: Element>(&self, data: &mut [T], from: usize) -> Result<(), DdpError> {
        self.exchange(vec![], vec![Incoming::copy(from, data)])
    }
}
