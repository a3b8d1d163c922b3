//! All-gather, even and uneven.

use super::Collective;
use crate::{
    DdpError, Element,
    transport::{Incoming, Outgoing},
};

/// From this many bytes of result on, an all-gather uses the ring.
pub(crate) const RING: usize = 256 << 10;

impl Collective<'_> {
    /// The data of all ranks in rank order, equally long on each.
    pub(crate) fn all_gather<T: Element>(&self, data: &[T]) -> Result<Vec<T>, DdpError> {
        if size_of_val(data) * self.world_size < RING {
            return self.all_gather_direct(data);
        }
        let mut all = vec![T::zeroed(); data.len() * self.world_size];
        all[self.rank * data.len()..][..data.len()].copy_from_slice(data);
        self.all_gather_ring(&mut all, self.rank)?;
        Ok(all)
    }

    pub(crate) fn all_gather_direct<T: Element>(&self, data: &[T]) -> Result<Vec<T>, DdpError> {
        let mut all = vec![T::zeroed(); data.len() * self.world_size];
        let outgoing = self.peers().map(|peer| Outgoing::new(peer, data)).collect();
        let mut incoming = Vec::with_capacity(self.world_size);
        let mut rest = all.as_mut_slice();
        for peer in 0..self.world_size {
            let (row, after) = rest.split_at_mut(data.len());
            rest = after;
            match peer == self.rank {
                true => row.copy_from_slice(data),
                false => incoming.push(Incoming::copy(peer, row)),
            }
        }
        self.exchange(outgoing, incoming)?;
        Ok(all)
    }

    /// The data of each rank, of any length.
    pub(crate) fn all_gather_uneven<T: Element>(
        &self,
        data: &[T],
    ) -> Result<Vec<Vec<T>>, DdpError> {
        let lengths = self.all_gather_direct(&[data.len() as u64])?;
        let mut all: Vec<Vec<T>> = lengths
            .iter()
            .map(|length| vec![T::zeroed(); *length as usize])
            .collect();
        let outgoing = self.peers().map(|peer| Outgoing::new(peer, data)).collect();
        let mut incoming = Vec::with_capacity(self.world_size);
        for (peer, row) in all.iter_mut().enumerate() {
            match peer == self.rank {
                true => row.copy_from_slice(data),
                false => incoming.push(Incoming::copy(peer, row)),
            }
        }
        self.exchange(outgoing, incoming)?;
        Ok(all)
    }
}
