//! The data loader: the sampler's order, whatever the number of workers.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use burn::{
    data::{
        dataloader::{DataLoader, batcher::Batcher},
        dataset::{Dataset, DatasetError, InMemDataset},
    },
    tensor::Device,
};
use burn_ddp::{DistributedLoader, DistributedSampler};

/// Batches are their items and the device they were made for.
struct Keep;

impl Batcher<usize, (Vec<usize>, Device)> for Keep {
    fn batch(&self, items: Vec<usize>, device: &Device) -> (Vec<usize>, Device) {
        // The later of two workers is often done first.
        if items[0].is_multiple_of(2) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        (items, device.clone())
    }
}

fn dataset() -> InMemDataset<usize> {
    InMemDataset::new((0..23).map(|item| item * 10).collect())
}

fn sampler() -> DistributedSampler {
    DistributedSampler::new(23, 1, 2).shuffle(true).seed(5)
}

fn items(sampler: &DistributedSampler) -> Vec<usize> {
    sampler.indices().iter().map(|index| index * 10).collect()
}

fn pass(loader: &dyn DataLoader<(Vec<usize>, Device)>) -> Vec<Vec<usize>> {
    loader.iter().map(|batch| batch.unwrap().0).collect()
}

#[test]
fn the_order_is_the_samplers_whatever_the_number_of_workers() {
    for workers in [0, 1, 2, 3, 8] {
        let loader = DistributedLoader::new(dataset(), Keep, sampler())
            .batch_size(5)
            .num_workers(workers);
        assert_eq!(loader.num_items(), 12);
        for epoch in 0..3 {
            let mut expected = sampler();
            expected.set_epoch(epoch);
            let batches = pass(&loader);
            assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [5, 5, 2]);
            assert_eq!(batches.concat(), items(&expected), "{workers} workers");
        }
        // Back to an epoch, and to the middle of it.
        loader.set_epoch(1);
        loader.skip(5);
        assert_eq!(loader.num_items(), 7);
        let mut expected = sampler();
        expected.set_epoch(1);
        assert_eq!(pass(&loader).concat(), items(&expected)[5..]);
        assert_eq!(loader.num_items(), 12);
        loader.load_state(&expected.state(7));
        assert_eq!(pass(&loader).concat(), items(&expected)[7..]);
    }
}

/// As where a program goes back to a checkpoint without starting again.
#[test]
fn a_state_that_was_loaded_in_an_epoch_is_the_state() {
    let loader = DistributedLoader::new(dataset(), Keep, sampler()).batch_size(5);
    loader.set_epoch(1);
    let mut expected = sampler();
    expected.set_epoch(1);
    let saved = expected.state(5);
    loader.set_epoch(7);
    let mut begun = loader.iter();
    begun.next().unwrap().unwrap();
    assert_eq!(loader.state(5).epoch, 7);
    loader.load_state(&saved);
    assert_eq!(loader.state(0), saved);
    loader.set_epoch(loader.state(0).epoch);
    assert_eq!(pass(&loader).concat(), items(&expected)[5..]);
    // The same by hand.
    loader.set_epoch(1);
    loader.skip(5);
    assert_eq!(loader.state(0), saved);
}

#[test]
fn batches_that_are_not_full_may_be_dropped() {
    let full = |items: &[usize], size: usize| -> Vec<Vec<usize>> {
        items
            .chunks(size)
            .map(<[_]>::to_vec)
            .filter(|it| it.len() == size)
            .collect()
    };
    let sizes = |batches: &[Vec<usize>]| batches.iter().map(Vec::len).sum::<usize>();
    let all = items(&sampler());
    for (size, workers) in (1..=13).flat_map(|size| [(size, 0), (size, 2)]) {
        let loader = DistributedLoader::new(dataset(), Keep, sampler())
            .batch_size(size)
            .num_workers(workers)
            .drop_last(true);
        let expected = full(&all, size);
        assert_eq!(loader.num_items(), sizes(&expected));
        let mut passed = loader.iter();
        let batches: Vec<Vec<usize>> = passed.by_ref().map(|batch| batch.unwrap().0).collect();
        assert_eq!(batches, expected, "{size}");
        let progress = passed.progress();
        let counted = (progress.items_processed, progress.items_total);
        assert_eq!(counted, (sizes(&expected), sizes(&expected)));
        drop(passed);
        // The rest of an epoch, a slice, and the same on another device.
        loader.set_epoch(0);
        loader.skip(5);
        let expected = full(&all[5..], size);
        assert_eq!(loader.num_items(), sizes(&expected));
        assert_eq!(pass(&loader), expected);
        loader.set_epoch(0);
        let slice = DataLoader::slice(&loader, 1, 9).to_device(&Device::flex());
        assert_eq!(pass(&*slice), full(&all[1..9], size));
        // As without it.
        let loader = loader.drop_last(false);
        loader.set_epoch(0);
        assert_eq!(pass(&loader).concat(), all);
    }
}

#[test]
fn a_pass_may_be_left_early() {
    let loader = DistributedLoader::new(dataset(), Keep, sampler()).num_workers(3);
    loader.iter().next().unwrap().unwrap();
    let mut expected = sampler();
    expected.set_epoch(1);
    assert_eq!(pass(&loader).concat(), items(&expected));
}

/// Runs code that must not wait for ever.
fn in_time<R: Send + 'static>(code: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, result) = mpsc::channel();
    thread::spawn(move || sender.send(code()));
    result
        .recv_timeout(Duration::from_secs(60))
        .expect("it neither hangs nor panics")
}

#[test]
fn several_passes_may_be_under_way() {
    for workers in [1, 2, 3] {
        let batches = in_time(move || {
            let loader = DistributedLoader::new(dataset(), Keep, sampler()).num_workers(workers);
            let (first, second) = (loader.iter(), loader.iter());
            let pairs = first.zip(second);
            let pairs: Vec<_> = pairs.map(|(a, b)| (a.unwrap().0, b.unwrap().0)).collect();
            // One that was begun and not gone on with.
            let mut left = loader.iter();
            left.next().unwrap().unwrap();
            (pairs, pass(&loader).concat())
        });
        let (pairs, last) = batches;
        let (first, second): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        for (epoch, batches) in [(0, first), (1, second), (3, vec![last])] {
            let mut expected = sampler();
            expected.set_epoch(epoch);
            assert_eq!(batches.concat(), items(&expected), "{workers} workers");
        }
    }
}

#[test]
fn slices_and_other_devices() {
    let loader = DistributedLoader::new(dataset(), Keep, sampler())
        .batch_size(2)
        .num_workers(2);
    let all = items(&sampler());
    let slice = DataLoader::slice(&loader, 3, 10);
    assert_eq!(slice.num_items(), 7);
    assert_eq!(pass(&*slice).concat(), all[3..10]);
    let slice = DataLoader::slice(&loader, 3, 10).slice(2, 100);
    assert_eq!(pass(&*slice).concat(), all[5..10]);
    let device = Device::flex().autodiff();
    let moved = DataLoader::to_device(&loader, &device);
    assert!(moved.iter().all(|batch| batch.unwrap().1.is_autodiff()));
    let loader = DistributedLoader::new(dataset(), Keep, sampler()).device(device);
    assert!(loader.iter().all(|batch| batch.unwrap().1.is_autodiff()));
}

/// Item 3 cannot be read, and item 4 is a trap.
struct Broken;

impl Dataset<usize> for Broken {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        match index {
            3 => Err(DatasetError::new(std::io::Error::other("no such file"))),
            4 => panic!("on purpose"),
            _ => Ok(index),
        }
    }

    fn len(&self) -> usize {
        6
    }
}

#[test]
fn an_item_that_cannot_be_read_is_an_error_in_its_place() {
    for workers in [0, 2] {
        let sampler = DistributedSampler::subset([1, 3, 2], 0, 1);
        let loader = DistributedLoader::new(Broken, Keep, sampler).num_workers(workers);
        let read: Vec<bool> = loader.iter().map(|batch| batch.is_ok()).collect();
        assert_eq!(read, [true, false, true]);
    }
}

#[test]
fn a_worker_that_panics_is_an_error_and_no_hang() {
    let sampler = DistributedSampler::subset([0, 1, 4, 2, 5, 1], 0, 1);
    let loader = Arc::new(DistributedLoader::new(Broken, Keep, sampler).num_workers(2));
    let batches: Vec<_> = loader.iter().collect();
    let read: Vec<bool> = batches.iter().map(Result::is_ok).collect();
    assert_eq!(read, [true, true, false, true, true, true]);
    // Worker 0 makes every second batch.
    let error = batches[2].as_ref().unwrap_err().to_string();
    assert!(error.contains("worker 0 has panicked"), "{error}");
}

#[test]
#[should_panic(expected = "the dataset must have the length that the sampler was made for")]
fn another_dataset_is_refused() {
    let _ = DistributedLoader::new(dataset(), Keep, DistributedSampler::new(5, 0, 1));
}
