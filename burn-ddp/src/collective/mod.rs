//! The algorithms, written once over [`Transport::exchange`].
//!
//! Every algorithm leaves bitwise equal results on all ranks: each element is reduced in one place,
//! or everywhere in the same order.

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

    /// The same call where the elements go by NCCL and the ranks only meet here: to one that sends its
    /// elements here it is another.
    #[cfg(any(test, feature = "nccl"))]
    pub(crate) fn by_nccl(mut self) -> Self {
        self.call.by_nccl = true;
        self
    }

    /// The same call with arguments that cannot work, in which nothing travels.
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

    /// The part of `len` elements that rank `index` (counted around the ring) is in charge of.
    fn chunk(&self, len: usize, index: usize) -> Range<usize> {
        let index = index % self.world_size;
        let at = |index: usize| (index as u128 * len as u128 / self.world_size as u128) as usize;
        at(index)..at(index + 1)
    }
}
