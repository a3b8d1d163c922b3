//! Which items of a dataset each rank sees.

mod gather;
mod loader;
#[cfg(feature = "train")]
pub(crate) mod made;
mod source;
mod state;

use std::sync::Arc;

use burn::data::{dataset::Dataset, dataset::transform::SelectionDataset};

use self::source::Source;
pub use self::{loader::DistributedLoader, state::SamplerState};
use crate::{DdpError, ProcessGroup};

/// Divides the items of a dataset among the ranks, as PyTorch's `DistributedSampler` does.
///
/// The order is that of the dataset, or a permutation drawn from `seed + epoch`, the same on all ranks. Rank
/// `r` of `n` takes items `r`, `r + n`, and so on. If the length is not a multiple of `n`, items from the front
/// are repeated so that all ranks have the same number ([`drop_last`](Self::drop_last) leaves the surplus out
/// instead; [`each_once`](Self::each_once) does neither). The items are a whole dataset, a part of it
/// ([`subset`](Self::subset)), or random draws by weight ([`weighted`](Self::weighted)).
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
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct DistributedSampler {
    source: Source,
    rank: usize,
    world_size: usize,
    shuffle: bool,
    seed: u64,
    epoch: u64,
    uneven: Uneven,
    skip: usize,
}

/// What to do if the number of items is not a multiple of the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Uneven {
    Pad,
    Drop,
    Keep,
}

impl DistributedSampler {
    /// A sampler over `items` items, padded and not shuffled. Like Burn's loaders, and unlike PyTorch's
    /// sampler, it [shuffles](Self::shuffle) only on request.
    ///
    /// # Panics
    ///
    /// Panics if `rank` is not below `world_size`.
    pub fn new(items: usize, rank: usize, world_size: usize) -> Self {
        Self::of(Source::All(items), rank, world_size)
    }

    /// A sampler over some of the items of a dataset: with shuffling, PyTorch's `SubsetRandomSampler`
    /// distributed over ranks. An index counts as often as it is listed.
    ///
    /// ```
    /// use burn_ddp::DistributedSampler;
    ///
    /// let held_out = DistributedSampler::subset([3, 1, 4, 1, 5], 0, 2);
    /// assert_eq!(held_out.indices(), [3, 4, 5]);
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if `rank` is not below `world_size`.
    pub fn subset(
        indices: impl IntoIterator<Item = usize>,
        rank: usize,
        world_size: usize,
    ) -> Self {
        let indices = indices.into_iter().collect();
        Self::of(Source::Subset(indices), rank, world_size)
    }

    /// A sampler that draws `draws` items in each epoch, independently and with replacement, with probabilities
    /// proportional to the weights: PyTorch's `WeightedRandomSampler` distributed over ranks. All ranks divide
    /// the same draws. [Shuffling](Self::shuffle) has no effect.
    ///
    /// ```
    /// use burn_ddp::DistributedSampler;
    ///
    /// // Items 0 and 1 are of a rare class.
    /// let weights = [5.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0];
    /// let sampler = DistributedSampler::weighted(&weights, 100, 0, 4).seed(42);
    /// assert_eq!(sampler.len(), 25);
    /// assert!(!sampler.indices().contains(&9));
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if `rank` is not below `world_size`, if a weight is negative or not finite, or if no weight is positive.
    pub fn weighted(weights: &[f64], draws: usize, rank: usize, world_size: usize) -> Self {
        Self::of(Source::weighted(weights, draws), rank, world_size)
    }

    fn of(source: Source, rank: usize, world_size: usize) -> Self {
        assert!(
            rank < world_size,
            "rank {rank} must be below the world size, {world_size}"
        );
        Self {
            source,
            rank,
            world_size,
            shuffle: false,
            seed: 0,
            epoch: 0,
            uneven: Uneven::Pad,
            skip: 0,
        }
    }

    /// A sampler over `items` items that deals out [each item once](Self::each_once).
    ///
    /// # Panics
    ///
    /// Panics if `rank` is not below `world_size`.
    pub fn evaluation(items: usize, rank: usize, world_size: usize) -> Self {
        Self::new(items, rank, world_size).each_once()
    }

    /// Deals out each item exactly once, so that results over all ranks count nothing twice. Some ranks may get
    /// one item fewer than others. For evaluation, of a whole dataset or of a [subset](Self::subset).
    ///
    /// ```
    /// use burn_ddp::DistributedSampler;
    ///
    /// let held_out = |rank| DistributedSampler::subset([3, 1, 4, 2, 5], rank, 2).each_once();
    /// assert_eq!(held_out(0).indices(), [3, 4, 5]);
    /// assert_eq!(held_out(1).indices(), [1, 2]);
    /// ```
    pub fn each_once(mut self) -> Self {
        self.uneven = Uneven::Keep;
        self
    }

    /// Whether to draw a new permutation for each epoch, as is usual in training.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// The seed of the permutations and draws. It must be the same on all ranks.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whether to leave out surplus items, instead of repeating some. Has no effect on a sampler that deals out
    /// [each item once](Self::each_once).
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        if self.uneven != Uneven::Keep {
            self.uneven = match drop_last {
                true => Uneven::Drop,
                false => Uneven::Pad,
            };
        }
        self
    }

    /// Sets the epoch, which selects the permutation. Changing the epoch cancels a [skip](Self::skip). Setting the same
    /// epoch again keeps it, so that a loop which starts with this call still resumes at a loaded [state](Self::load_state).
    pub fn set_epoch(&mut self, epoch: u64) {
        if epoch != self.epoch {
            self.epoch = epoch;
            self.skip = 0;
        }
    }

    /// Skips this rank's first `items` items of the epoch, which it has seen before an interruption.
    pub fn skip(&mut self, items: usize) {
        self.skip = items;
    }

    /// The number of this rank's items in the epoch, without skipped ones.
    pub fn len(&self) -> usize {
        self.share(self.rank).saturating_sub(self.skip)
    }

    /// Whether this rank has no items (left) in the epoch.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// This rank's items in order.
    pub fn indices(&self) -> Vec<usize> {
        let seed = self.seed.wrapping_add(self.epoch);
        let order = self.source.order(seed, self.shuffle);
        (self.skip..self.share(self.rank))
            .map(|turn| order[(self.rank + turn * self.world_size) % order.len()])
            .collect()
    }

    /// This rank's items as a dataset for Burn's `DataLoaderBuilder` (which must not shuffle again). Create a
    /// new one for each epoch. With more than one worker, Burn's loader returns batches as they become ready;
    /// [`DistributedLoader`] keeps their order.
    ///
    /// # Panics
    ///
    /// Panics if the dataset's length is not the one that the sampler was made for, or, for a subset, if it
    /// lacks one of the items.
    pub fn shard<D, I>(&self, dataset: impl Into<Arc<D>>) -> SelectionDataset<D, I>
    where
        D: Dataset<I>,
        I: Clone + Send + Sync,
    {
        let dataset = dataset.into();
        self.source.check(dataset.len());
        SelectionDataset::from_indices_checked(dataset, self.indices())
    }

    /// Checks that this is the sampler of this rank of the group.
    pub(crate) fn check_place(&self, group: &ProcessGroup) -> Result<(), DdpError> {
        let expected = (group.rank(), group.world_size());
        match (self.rank, self.world_size) == expected {
            true => Ok(()),
            false => Err(DdpError::InvalidArgument(format!(
                "the sampler is that of rank {} of {}; expected rank {} of {}",
                self.rank, self.world_size, expected.0, expected.1
            ))),
        }
    }

    /// The number of a rank's items in a whole epoch.
    fn share(&self, rank: usize) -> usize {
        let items = self.source.len();
        match self.uneven {
            Uneven::Pad => items.div_ceil(self.world_size),
            Uneven::Drop => items / self.world_size,
            Uneven::Keep => (items + self.world_size - 1 - rank) / self.world_size,
        }
    }
}
