//! The items of an epoch in order, before they are divided among ranks.

use std::sync::Arc;

use rand::{
    SeedableRng,
    distr::{Distribution, weighted::WeightedIndex},
    seq::SliceRandom,
};
use rand_chacha::ChaCha8Rng;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Source {
    /// The whole of a dataset with this many items.
    All(usize),
    /// These items of a dataset.
    Subset(Arc<[usize]>),
    /// `draws` draws from `items` items with these weights.
    Weighted {
        weights: Arc<WeightedIndex<f64>>,
        items: usize,
        draws: usize,
    },
}

impl Source {
    pub(super) fn weighted(weights: &[f64], draws: usize) -> Self {
        assert!(
            weights.iter().all(|weight| weight.is_finite()),
            "weights must be finite"
        );
        let items = weights.len();
        match WeightedIndex::new(weights) {
            Ok(weights) => Self::Weighted {
                weights: Arc::new(weights),
                items,
                draws,
            },
            Err(error) => {
                panic!("weights must be 0 or more, and at least one must be positive: {error}")
            }
        }
    }

    /// The number of items of an epoch.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::All(items) => *items,
            Self::Subset(indices) => indices.len(),
            Self::Weighted { draws, .. } => *draws,
        }
    }

    /// The items of an epoch, the same on all ranks.
    pub(super) fn order(&self, seed: u64, shuffle: bool) -> Vec<usize> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut order: Vec<usize> = match self {
            Self::All(items) => (0..*items).collect(),
            Self::Subset(indices) => indices.to_vec(),
            Self::Weighted { weights, draws, .. } => {
                let weights: &WeightedIndex<f64> = weights;
                return weights.sample_iter(&mut rng).take(*draws).collect();
            }
        };
        if shuffle {
            order.shuffle(&mut rng);
        }
        order
    }

    /// Checks that a dataset of `len` items fits.
    ///
    /// # Panics
    ///
    /// Panics if it does not.
    pub(super) fn check(&self, len: usize) {
        match self {
            Self::All(items) | Self::Weighted { items, .. } => assert_eq!(
                len, *items,
                "the dataset must have the length that the sampler was made for"
            ),
            Self::Subset(indices) => {
                let last = indices.iter().max();
                assert!(
                    last.is_none_or(|last| *last < len),
                    "item {last:?} of the subset is not among the dataset's {len}"
                );
            }
        }
    }
}
