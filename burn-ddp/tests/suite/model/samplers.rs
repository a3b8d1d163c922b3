//! Random samplers and loaders beside PyTorch's definition, and runs that were broken off and resumed beside those that were not.

use burn::{
    data::{
        dataloader::{DataLoader, batcher::Batcher},
        dataset::InMemDataset,
    },
    tensor::Device,
};
use burn_ddp::{DistributedLoader, DistributedSampler, SamplerState};
use proptest::prelude::*;

use super::{config, watched};

#[derive(Clone, Debug)]
enum Of {
    All(usize),
    Subset(Vec<usize>),
    /// With these weights, so many draws.
    Weighted(Vec<f64>, usize),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Uneven {
    Pad,
    Drop,
    Once,
}

#[derive(Clone, Debug)]
struct Case {
    of: Of,
    ranks: usize,
    uneven: Uneven,
    shuffle: bool,
    seed: u64,
    epoch: u64,
    /// How many batches each rank takes before the run is broken off, and with how many ranks it goes on.
    breaks: Vec<(usize, usize)>,
    batch: usize,
    workers: usize,
    /// Whether the loop over epochs calls `set_epoch`.
    sets_epochs: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let weights = prop::collection::vec(prop_oneof![Just(0.0), 0.1f64..5.0], 1..20);
    let weights = weights.prop_filter("one is positive", |all| all.iter().any(|it| *it > 0.0));
    let of = prop_oneof![
        (0usize..60).prop_map(Of::All),
        prop::collection::vec(0usize..60, 0..60).prop_map(Of::Subset),
        (weights, 0usize..60).prop_map(|(weights, draws)| Of::Weighted(weights, draws)),
    ];
    let uneven = prop::sample::select(vec![Uneven::Pad, Uneven::Drop, Uneven::Once]);
    (
        of,
        1usize..7,
        uneven,
        (
            any::<bool>(),
            any::<u64>(),
            prop_oneof![0u64..4, any::<u64>()],
        ),
        prop::collection::vec((0usize..4, 1usize..7), 0..4),
        (1usize..6, 0usize..3, any::<bool>()),
    )
        .prop_map(
            |(of, ranks, uneven, (shuffle, seed, epoch), breaks, (batch, workers, sets_epochs))| {
                Case {
                    of,
                    ranks,
                    uneven,
                    shuffle,
                    seed,
                    // The last epoch has none after it.
                    epoch: epoch.min(u64::MAX - 2),
                    breaks,
                    batch,
                    workers,
                    sets_epochs,
                }
            },
        )
}

impl Case {
    fn sampler(&self, rank: usize, ranks: usize) -> DistributedSampler {
        let sampler = match &self.of {
            Of::All(items) => DistributedSampler::new(*items, rank, ranks),
            Of::Subset(items) => DistributedSampler::subset(items.iter().copied(), rank, ranks),
            Of::Weighted(weights, draws) => {
                DistributedSampler::weighted(weights, *draws, rank, ranks)
            }
        };
        let sampler = match self.uneven {
            Uneven::Pad => sampler,
            Uneven::Drop => sampler.drop_last(true),
            Uneven::Once => sampler.each_once(),
        };
        sampler.shuffle(self.shuffle).seed(self.seed)
    }

    /// The items of an epoch in order, which a single rank gets.
    fn order(&self, epoch: u64) -> Vec<usize> {
        let mut alone = self.sampler(0, 1);
        alone.set_epoch(epoch);
        alone.indices()
    }

    /// PyTorch's definition, in Python's words: `indices += (indices * ceil(padding / len))[:padding]` or
    /// `indices[:total]`, and then `indices[rank::ranks]`.
    fn share(&self, order: &[usize], rank: usize, ranks: usize) -> Vec<usize> {
        let len = order.len();
        let total = match self.uneven {
            Uneven::Pad => len.div_ceil(ranks) * ranks,
            Uneven::Drop => len / ranks * ranks,
            Uneven::Once => len,
        };
        let dealt = order.iter().cycle().take(if len == 0 { 0 } else { total });
        dealt.skip(rank).step_by(ranks).copied().collect()
    }

    fn loader(&self, rank: usize, ranks: usize) -> DistributedLoader<usize, Vec<usize>> {
        let items = match &self.of {
            Of::All(items) => *items,
            Of::Subset(_) => 60,
            Of::Weighted(weights, _) => weights.len(),
        };
        let dataset = InMemDataset::new((0..items).collect());
        DistributedLoader::new(dataset, Items, self.sampler(rank, ranks))
            .batch_size(self.batch)
            .num_workers(self.workers)
    }
}

/// Batches that are their items.
pub(crate) struct Items;

impl Batcher<usize, Vec<usize>> for Items {
    fn batch(&self, items: Vec<usize>, _device: &Device) -> Vec<usize> {
        items
    }
}

fn sorted(items: &[usize]) -> Vec<usize> {
    let mut items = items.to_vec();
    items.sort_unstable();
    items
}

fn check_order(case: &Case) {
    let order = case.order(case.epoch);
    match &case.of {
        Of::All(items) => assert_eq!(sorted(&order), (0..*items).collect::<Vec<_>>()),
        Of::Subset(items) => assert_eq!(sorted(&order), sorted(items)),
        Of::Weighted(weights, draws) => {
            assert_eq!(order.len(), *draws);
            assert!(order.iter().all(|item| weights[*item] > 0.0));
        }
    }
    match &case.of {
        Of::All(_) if !case.shuffle => assert!(order.is_sorted()),
        Of::Subset(items) if !case.shuffle => assert_eq!(order, *items),
        _ => {
            // As in PyTorch, seed and epoch add up.
            let later = Case {
                seed: case.seed.wrapping_add(1),
                ..case.clone()
            };
            assert_eq!(case.order(case.epoch + 1), later.order(case.epoch));
        }
    }
    for rank in 0..case.ranks {
        let mut sampler = case.sampler(rank, case.ranks);
        sampler.set_epoch(case.epoch);
        let share = case.share(&order, rank, case.ranks);
        assert_eq!(sampler.indices(), share);
        for skip in [0, 1, share.len(), share.len() + 1] {
            sampler.skip(skip);
            let rest = share.get(skip..).unwrap_or_default();
            assert_eq!(sampler.indices(), rest);
            assert_eq!(
                (sampler.len(), sampler.is_empty()),
                (rest.len(), rest.is_empty())
            );
        }
    }
}

/// An epoch that is broken off and resumed, maybe with other ranks, and the epoch after it.
fn check_resumed(case: &Case) {
    let order = case.order(case.epoch);
    let (mut ranks, mut state) = (case.ranks, None);
    let mut seen = Vec::new();
    let stages = case.breaks.iter().map(Some).chain([None]);
    for stage in stages {
        // What was taken before, by all ranks, and no whole round of these ranks, is taken again.
        let skip = state.map_or(0, |state: SamplerState| state.taken / ranks);
        let mut next = None;
        for rank in (0..ranks).rev() {
            let loader = case.loader(rank, ranks);
            match &state {
                Some(state) => loader.load_state(state),
                None => loader.set_epoch(case.epoch),
            }
            if case.sets_epochs {
                loader.set_epoch(case.epoch);
            }
            let share = case.share(&order, rank, ranks);
            let rest = share.get(skip..).unwrap_or_default();
            assert_eq!(loader.num_items(), rest.len());
            assert_eq!(loader.state(0).taken, skip * ranks);
            let mut pass = loader.iter();
            let batches = stage.map_or(usize::MAX, |(batches, _)| *batches);
            let taken: Vec<Vec<usize>> = pass.by_ref().take(batches).map(Result::unwrap).collect();
            let expected: Vec<&[usize]> = rest.chunks(case.batch).take(batches).collect();
            assert_eq!(taken, expected);
            let progress = pass.progress();
            assert_eq!(progress.items_total, rest.len());
            assert_eq!(progress.items_processed, taken.concat().len());
            drop(pass);
            seen.extend(taken.concat());
            // The first rank has as many items as any.
            next = Some(loader.state(progress.items_processed));
            if stage.is_none() {
                if case.sets_epochs {
                    loader.set_epoch(case.epoch + 1);
                }
                let all: Vec<Vec<usize>> = loader.iter().map(Result::unwrap).collect();
                let order = case.order(case.epoch + 1);
                assert_eq!(all.concat(), case.share(&order, rank, ranks));
            }
        }
        // As a checkpoint has it.
        let text = serde_json::to_string(&next.unwrap()).unwrap();
        state = Some(serde_json::from_str(&text).unwrap());
        if let Some((_, after)) = stage {
            ranks = *after;
        }
    }
    // Nothing is lost, whatever the numbers of ranks were.
    if case.uneven != Uneven::Drop {
        let [seen, all] = [sorted(&seen), sorted(&order)];
        assert!(all.iter().all(|item| seen.binary_search(item).is_ok()));
    }
    if case.breaks.iter().all(|(_, after)| *after == case.ranks) {
        let shares = (0..case.ranks).flat_map(|rank| case.share(&order, rank, case.ranks));
        assert_eq!(sorted(&seen), sorted(&shares.collect::<Vec<_>>()));
    }
}

proptest! {
    #![proptest_config(config(256))]
    #[test]
    fn items_are_dealt_out_as_pytorch_does(case in cases()) {
        check_order(&case);
    }

    #[test]
    fn an_epoch_that_was_broken_off_goes_on(case in cases()) {
        watched(&case, check_resumed);
    }
}
