//! The position of a sampler, for a checkpoint.

use serde::{Deserialize, Serialize};

use super::DistributedSampler;

/// The position of the ranks in their epoch, the same on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// The seed of the permutations.
    pub seed: u64,
    /// The epoch.
    pub epoch: u64,
    /// The number of items of the epoch that all ranks together have taken.
    pub taken: usize,
}

impl DistributedSampler {
    /// The state after this rank has taken `items` of its [`indices`](Self::indices), and each other rank as many.
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

    /// Continues at a saved [`state`](Self::state). If the number of ranks has changed and does not divide the
    /// number of items taken, the remainder (fewer items than there are ranks) is taken again. Start the loop
    /// over epochs with `state.epoch`: [`set_epoch`](Self::set_epoch) with this epoch changes nothing.
    pub fn load_state(&mut self, state: &SamplerState) {
        self.seed = state.seed;
        self.epoch = state.epoch;
        self.skip(state.taken / self.world_size);
    }
}
