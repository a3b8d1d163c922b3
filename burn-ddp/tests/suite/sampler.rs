//! The sampler against PyTorch's, in data loaders, and what it refuses.

use burn::data::{
    dataloader::{DataLoaderBuilder, batcher::Batcher},
    dataset::{Dataset, InMemDataset},
};
use burn::tensor::Device;
use burn_ddp::DistributedSampler;
use proptest::prelude::*;
use serde::Deserialize;

use crate::suite::ranks::locally;

#[derive(Deserialize)]
struct Case {
    length: usize,
    ranks: usize,
    drop_last: bool,
    indices: Vec<Vec<usize>>,
}

#[test]
fn without_shuffling_it_is_pytorchs() {
    let text = include_str!("../fixtures/distributed_sampler_no_shuffle.json");
    let cases: Vec<Case> = serde_json::from_str(text).unwrap();
    assert!(cases.len() > 20);
    for case in cases {
        for (rank, expected) in case.indices.iter().enumerate() {
            let sampler =
                DistributedSampler::new(case.length, rank, case.ranks).drop_last(case.drop_last);
            assert_eq!(sampler.indices(), *expected);
            assert_eq!(sampler.len(), expected.len());
        }
    }
}

#[test]
fn epochs_differ_and_repeat() {
    let mut sampler = DistributedSampler::new(100, 0, 2).shuffle(true).seed(7);
    let first = sampler.indices();
    sampler.set_epoch(1);
    let second = sampler.indices();
    assert_ne!(first, second);
    sampler.set_epoch(0);
    assert_eq!(sampler.indices(), first);
    // seed + epoch, as in PyTorch.
    assert_eq!(
        DistributedSampler::new(100, 0, 2)
            .shuffle(true)
            .seed(8)
            .indices(),
        second
    );
}

#[test]
#[should_panic(expected = "rank 2 must be below the world size, 2")]
fn a_rank_outside_is_refused() {
    let _ = DistributedSampler::new(10, 2, 2);
}

#[derive(Clone)]
struct Collect;

impl Batcher<usize, Vec<usize>> for Collect {
    fn batch(&self, items: Vec<usize>, _device: &Device) -> Vec<usize> {
        items
    }
}

#[test]
fn it_plugs_into_burns_data_loader() {
    let dataset = InMemDataset::new((0..23).map(|item| item * 10).collect::<Vec<usize>>());
    let mut sampler = DistributedSampler::new(23, 1, 2).shuffle(true).seed(5);
    sampler.set_epoch(2);
    let shard = sampler.shard(dataset);
    assert_eq!(shard.len(), 12);
    let loader = DataLoaderBuilder::new(Collect).batch_size(5).build(shard);
    let batches: Vec<Vec<usize>> = loader.iter().map(|batch| batch.unwrap()).collect();
    assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [5, 5, 2]);
    let expected: Vec<usize> = sampler.indices().iter().map(|index| index * 10).collect();
    assert_eq!(batches.concat(), expected);
}

#[test]
fn workers_of_burns_data_loader_load_a_shard_once_in_all() {
    let all = (0..2).flat_map(|rank| {
        let dataset = InMemDataset::new((0..23).map(|item| item * 10).collect::<Vec<usize>>());
        let shard = DistributedSampler::evaluation(23, rank, 2)
            .shuffle(true)
            .shard(dataset);
        let loader = DataLoaderBuilder::new(Collect)
            .batch_size(2)
            .num_workers(3)
            .build(shard);
        let batches = loader.iter().map(|batch| batch.unwrap());
        // Burn's workers take slices of it; each has a last batch of its own.
        batches.collect::<Vec<Vec<usize>>>().concat()
    });
    let mut all: Vec<usize> = all.collect();
    all.sort_unstable();
    assert_eq!(all, (0..23).map(|item| item * 10).collect::<Vec<_>>());
}

#[test]
#[should_panic(expected = "the dataset must have the length that the sampler was made for")]
fn another_dataset_is_refused() {
    let dataset = InMemDataset::new(vec![1usize, 2]);
    let _ = DistributedSampler::new(3, 0, 1).shard(dataset);
}

#[test]
fn weighted_draws_follow_the_weights() {
    let weights = [1.0, 0.0, 4.0, 2.0, 3.0];
    let draws = 20_000;
    let mut counts = [0usize; 5];
    for index in DistributedSampler::weighted(&weights, draws, 0, 1)
        .seed(1)
        .indices()
    {
        counts[index] += 1;
    }
    assert_eq!(counts[1], 0);
    // Pearson's statistic, of 3 degrees of freedom: above 16.3 once in a thousand seeds.
    let statistic: f64 = weights
        .iter()
        .zip(counts)
        .filter(|(weight, _)| **weight > 0.0)
        .map(|(weight, count)| {
            let expected = weight / 10.0 * draws as f64;
            (count as f64 - expected).powi(2) / expected
        })
        .sum();
    assert!(statistic < 16.3, "{counts:?}: {statistic}");
    let mut sampler = DistributedSampler::weighted(&weights, 50, 0, 1);
    let first = sampler.indices();
    sampler.set_epoch(1);
    assert_ne!(sampler.indices(), first);
}

#[test]
fn weights_that_are_none_are_refused() {
    for weights in [
        &[][..],
        &[0.0, 0.0],
        &[1.0, -1.0],
        &[f64::NAN],
        &[f64::INFINITY],
    ] {
        let drawn = std::panic::catch_unwind(|| DistributedSampler::weighted(weights, 1, 0, 1));
        assert!(drawn.is_err(), "{weights:?}");
    }
}

#[test]
#[should_panic(expected = "of the subset is not among the dataset's 2")]
fn a_subset_of_another_dataset_is_refused() {
    let dataset = InMemDataset::new(vec![1usize, 2]);
    let _ = DistributedSampler::subset([0, 2], 0, 1).shard(dataset);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn gathered_results_count_every_item_once(
        items in 0usize..40, ranks in 1usize..5, skip in 0usize..4, seed: u64, kind in 0..3, width in 1usize..3,
    ) {
        let sampler = |rank, ranks| {
            let mut sampler = match kind {
                0 => DistributedSampler::new(items, rank, ranks),
                1 => DistributedSampler::new(items, rank, ranks).drop_last(true),
                _ => DistributedSampler::evaluation(items, rank, ranks),
            };
            sampler = sampler.shuffle(true).seed(seed);
            sampler.skip(skip);
            sampler
        };
        // One rank sees the whole order.
        let mut whole = DistributedSampler::evaluation(items, 0, 1).shuffle(true).seed(seed);
        whole.skip(skip * ranks);
        let mut expected: Vec<u32> = whole.indices().iter().map(|index| *index as u32).collect();
        if kind == 1 {
            expected.truncate((items / ranks * ranks).saturating_sub(skip * ranks));
        }
        let expected: Vec<u32> = expected.iter().flat_map(|it| vec![*it; width]).collect();
        for gathered in locally(ranks, |group| {
            let sampler = sampler(group.rank(), ranks);
            let results: Vec<u32> = sampler
                .indices()
                .iter()
                .flat_map(|index| vec![*index as u32; width])
                .collect();
            sampler.gather_for_metrics(&group, &results).unwrap()
        }) {
            prop_assert_eq!(&gathered, &expected);
        }
    }
}

#[test]
fn results_that_do_not_come_out_even_are_refused() {
    for wrong in [3, 4] {
        locally(2, |group| {
            let sampler = DistributedSampler::new(4, group.rank(), 2);
            let results = vec![0f32; if group.rank() == 1 { wrong } else { 2 }];
            let error = sampler.gather_for_metrics(&group, &results).unwrap_err();
            assert!(error.to_string().contains("rank 1 has"), "{error}");
        });
    }
}

#[test]
fn results_of_another_ranks_sampler_are_refused() {
    for (rank, ranks) in [(0, 3), (1, 3), (0, 1)] {
        locally(2, |group| {
            let sampler = DistributedSampler::new(6, rank, ranks);
            let results = vec![0f32; sampler.len()];
            let gathered = sampler.gather_for_metrics(&group, &results);
            let error = gathered.unwrap_err().to_string();
            let expected = format!("expected rank {} of 2", group.rank());
            assert!(error.contains(&expected), "{error}");
        });
    }
}
