//! Where a sampler is, for a checkpoint.

use serde::{Deserialize, Serialize};

use super::DistributedSampler;

/// Where the ranks are in their epochs: the same on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// The seed of the permutations.
    pub seed: u64,
    /// The epoch.
    pub epoch: u64,
    /// Items of the epoch that all ranks together have taken.
    pub taken: usize,
}

impl DistributedSampler {
    /// Where this sampler is when this rank has taken `items` of the items that
    /// [`indices`](Self::indices) gives, and the other ranks as many.
    ///
    /// ```
    /// use burn_ddp::DistributedSampler;
    ///
    /// let sampler = |rank, ranks| DistributedSampler::new(24, rank, ranks).shuffle(true);
    /// let mut before = sampler(0, 2);
    /// before.set_epoch(3);
    /// let state = before.state(4);
    ///
    /// let mut after = sampler(0, 2);
    /// after.load_state(&state);
    /// assert_eq!(after.indices(), before.indices()[4..]);
    /// // Three ranks go on where two were: eight items were taken.
    /// let mut more = sampler(2, 3);
    /// more.load_state(&state);
    /// assert_eq!(more.len(), 6);
    /// ```
    pub fn state(&self, items: usize) -> SamplerState {
        SamplerState {
            seed: self.seed,
            epoch: self.epoch,
            taken: (self.skip + items) * self.world_size,
        }
    }

    /// Goes on where [`state`](Self::state) was. With another number of ranks, the items that do not come
    /// out even, fewer than there are ranks, are taken once more. The loop over epochs then starts with
    /// `state.epoch`: [`set_epoch`](Self::set_epoch) with that changes nothing.
    pub fn load_state(&mut self, state: &SamplerState) {
        self.seed = state.seed;
        self.epoch = state.epoch;
        self.skip(state.taken / self.world_size);
    }
}
