//! The algorithms of the collective calls, written once on top of [`Transport::exchange`].
//!
//! All ranks get bitwise equal results: each element is reduced on one rank, or on all in the same order.

mod all_reduce;
mod broadcast;
mod gather;
mod scatter;

use std::ops::Range;

pub(crate) use self::{all_reduce::Way, gather::RING};

use crate::{
    Call, DdpError, Flaw,
    transport::{Deadline, Incoming, Outgoing, Transport},
};

/// One call in progress.
pub(crate) struct Collective<'a> {
    pub(crate) transport: &'a dyn Transport,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) call: Call,
    pub(crate) deadline: Deadline,
}

impl Collective<'_> {
    fn exchange(
        &self,
        outgoing: Vec<Outgoing<'_>>,
        incoming: Vec<Incoming<'_>>,
    ) -> Result<(), DdpError> {
        self.transport
            .exchange(&self.call, outgoing, incoming, self.deadline)
    }

    /// The same call if NCCL moves the elements and the ranks only meet here. It counts as a different call
    /// from one whose elements travel here.
    #[cfg(any(test, feature = "nccl"))]
    pub(crate) fn by_nccl(mut self) -> Self {
        self.call.by_nccl = true;
        self
    }

    /// The same call with invalid arguments, in which no data travel.
    pub(crate) fn flawed(mut self, flaw: Flaw) -> Self {
        self.call.flaw = Some(flaw);
        self
    }

    /// The other ranks.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.world_size).filter(move |peer| *peer != rank)
    }

    /// The rank that is `steps` after this one in the ring.
    fn after(&self, steps: usize) -> usize {
        (self.rank + steps) % self.world_size
    }

    /// The rank that is `steps` before this one in the ring.
    fn before(&self, steps: usize) -> usize {
        (self.rank + self.world_size - steps % self.world_size) % self.world_size
    }

    /// The part of `len` elements that rank `index` (modulo the number of ranks) is responsible for.
    fn chunk(&self, len: usize, index: usize) -> Range<usize> {
        let index = index % self.world_size;
        let at = |index: usize| (index as u128 * len as u128 / self.world_size as u128) as usize;
        at(index)..at(index + 1)
    }
}
