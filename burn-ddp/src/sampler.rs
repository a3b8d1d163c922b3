//! Which items of a dataset each rank sees.

use burn::data::{dataset::Dataset, dataset::transform::SelectionDataset};
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

/// Deals the items of a dataset out to the ranks, as PyTorch's `DistributedSampler` does.
///
/// The order is the dataset's, or a permutation drawn from `seed + epoch`, the same on all ranks.
/// Rank `r` of `n` takes items `r`, `r + n`, and so on. Where the length is no multiple of `n`, items
/// from the front are repeated so that all ranks have equally many ([`drop_last`](Self::drop_last)
/// leaves the surplus out instead, [`evaluation`](Self::evaluation) does neither).
///
/// ```
/// use burn_ddp::DistributedSampler;
///
/// let mut sampler = DistributedSampler::new(10, 1, 4);
/// assert_eq!(sampler.indices(), [1, 5, 9]);
/// sampler = sampler.shuffle(true).seed(42);
/// for epoch in 0..2 {
///     sampler.set_epoch(epoch);
///     assert_eq!(sampler.indices().len(), sampler.len());
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct DistributedSampler {
    items: usize,
    rank: usize,
    world_size: usize,
    shuffle: bool,
    seed: u64,
    epoch: u64,
    uneven: Uneven,
    skip: usize,
}

/// What to do with the items that do not come out even.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Uneven {
    Pad,
    Drop,
    Keep,
}

impl DistributedSampler {
    /// A sampler over `items` items, not shuffled, padded.
    ///
    /// # Panics
    ///
    /// Panics if `rank` is not below `world_size`.
    pub fn new(items: usize, rank: usize, world_size: usize) -> Self {
        assert!(
            rank < world_size,
            "rank {rank} must be below the world size, {world_size}"
        );
        Self {
            items,
            rank,
            world_size,
            shuffle: false,
            seed: 0,
            epoch: 0,
            uneven: Uneven::Pad,
            skip: 0,
        }
    }

    /// A sampler that deals each item out exactly once, so that results over all ranks count
    /// nothing twice. Some ranks get one item less than others.
    ///
    /// # Panics
    ///
    /// Panics if `rank` is not below `world_size`.
    pub fn evaluation(items: usize, rank: usize, world_size: usize) -> Self {
        Self {
            uneven: Uneven::Keep,
            ..Self::new(items, rank, world_size)
        }
    }

    /// Whether to draw a new permutation for each epoch.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// The seed of the permutations: the same on all ranks.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whether to leave out the items that do not come out even, instead of repeating some. Has no
    /// effect on a sampler for evaluation.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        if self.uneven != Uneven::Keep {
            self.uneven = match drop_last {
                true => Uneven::Drop,
                false => Uneven::Pad,
            };
        }
        self
    }

    /// Sets the epoch, which selects the permutation, and forgets what was to be
    /// [skipped](Self::skip).
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.skip = 0;
    }

    /// Leaves out this rank's first `items` items of the epoch: those it has seen before it was
    /// interrupted.
    pub fn skip(&mut self, items: usize) {
        self.skip = items;
    }

    /// The number of this rank's items in the epoch, less those skipped.
    pub fn len(&self) -> usize {
        self.share().saturating_sub(self.skip)
    }

    /// Whether this rank has no items.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// This rank's items in their order.
    pub fn indices(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.items).collect();
        if self.shuffle {
            let seed = self.seed.wrapping_add(self.epoch);
            order.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
        }
        (self.skip..self.share())
            .map(|turn| order[(self.rank + turn * self.world_size) % self.items])
            .collect()
    }

    /// This rank's items as a dataset, for Burn's `DataLoaderBuilder` (which must not shuffle
    /// again). To be made anew for each epoch.
    ///
    /// # Panics
    ///
    /// Panics if the dataset has another length than the sampler was made for.
    pub fn shard<D, I>(&self, dataset: impl Into<Arc<D>>) -> SelectionDataset<D, I>
    where
        D: Dataset<I>,
        I: Clone + Send + Sync,
    {
        let dataset = dataset.into();
        assert_eq!(
            dataset.len(),
            self.items,
            "the dataset must have the length that the sampler was made for"
        );
        SelectionDataset::from_indices_checked(dataset, self.indices())
    }

    /// The number of this rank's items in a whole epoch.
    fn share(&self) -> usize {
        match self.uneven {
            Uneven::Pad => self.items.div_ceil(self.world_size),
            Uneven::Drop => self.items / self.world_size,
            Uneven::Keep => (self.items + self.world_size - 1 - self.rank) / self.world_size,
        }
    }
}
