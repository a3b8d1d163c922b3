//! A data loader whose batches come in the sampler's order, however many workers make them.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver},
    },
};

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderIterator, Progress, batcher::Batcher},
        dataset::{Dataset, DatasetError},
    },
    tensor::Device,
};

use super::{DistributedSampler, SamplerState};
use crate::{DdpError, group::Worker};

/// Batches that a worker makes ahead.
const AHEAD: usize = 2;

/// Burn's `DataLoader` over a rank's share of a dataset, for loops of one's own and for burn-train.
///
/// Each pass ([`iter`](DataLoader::iter)) is an epoch of the sampler; the next pass is the next epoch.
/// Batches come in the sampler's order whatever the number of workers, so that a run can be repeated and
/// resumed: worker `w` of `n` makes batches `w`, `w + n`, and so on, and they are taken in turn. (Burn's
/// own loader with several workers returns batches as they come.)
///
/// ```
/// use burn::{
///     data::{dataloader::{DataLoader, batcher::Batcher}, dataset::InMemDataset},
///     tensor::{Device, Int, Tensor, TensorData},
/// };
/// use burn_ddp::{DistributedLoader, DistributedSampler};
///
/// struct Numbers;
///
/// impl Batcher<i32, Tensor<1, Int>> for Numbers {
///     fn batch(&self, items: Vec<i32>, device: &Device) -> Tensor<1, Int> {
///         Tensor::from_data(TensorData::from(&items[..]), device)
///     }
/// }
///
/// let dataset = InMemDataset::new((0..10).collect::<Vec<i32>>());
/// let sampler = DistributedSampler::new(10, 0, 2);
/// let loader = DistributedLoader::new(dataset, Numbers, sampler)
///     .batch_size(2)
///     .num_workers(2)
///     .device(Device::flex());
/// let sums = loader.iter().map(|batch| batch.unwrap().sum().into_scalar::<i32>());
/// assert_eq!(sums.collect::<Vec<i32>>(), [2, 10, 8]); // 0 + 2, 4 + 6, 8
/// ```
pub struct DistributedLoader<I, O> {
    dataset: Arc<dyn Dataset<I>>,
    batcher: Arc<dyn Batcher<I, O>>,
    sampler: Arc<Mutex<DistributedSampler>>,
    batch_size: usize,
    device: Device,
    /// Which of the rank's items to load.
    range: Range<usize>,
    /// They live as long as the loader: a thread that uses a GPU holds a stream of it.
    workers: Vec<Worker>,
}

impl<I, O> DistributedLoader<I, O>
where
    I: Send + Sync + Clone + 'static,
    O: Send + 'static,
{
    /// A loader of batches of one item on the default device, without workers.
    ///
    /// # Panics
    ///
    /// Panics if the dataset is not one that the sampler was made for: see
    /// [`DistributedSampler::shard`].
    pub fn new(
        dataset: impl Dataset<I> + 'static,
        batcher: impl Batcher<I, O> + 'static,
        sampler: DistributedSampler,
    ) -> Self {
        sampler.source.check(dataset.len());
        Self {
            dataset: Arc::new(dataset),
            batcher: Arc::new(batcher),
            sampler: Arc::new(Mutex::new(sampler)),
            batch_size: 1,
            device: Device::default(),
            range: 0..usize::MAX,
            workers: Vec::new(),
        }
    }

    /// The number of items of a batch. The last of an epoch may have fewer.
    ///
    /// # Panics
    ///
    /// Panics if it is 0.
    #[must_use]
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        assert!(batch_size > 0, "a batch has at least one item");
        self.batch_size = batch_size;
        self
    }

    /// The number of threads that load items and make batches. With 0, the caller's own does.
    #[must_use]
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.workers = (0..num_workers).map(|_| Worker::default()).collect();
        self
    }

    /// The device on which batches are made.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// The epoch of the next pass.
    pub fn set_epoch(&self, epoch: u64) {
        self.sampler().set_epoch(epoch);
    }

    /// Leaves out this rank's first `items` items of the next pass: see
    /// [`DistributedSampler::skip`].
    pub fn skip(&self, items: usize) {
        self.sampler().skip(items);
    }

    /// Goes on, in the next pass, where a sampler's [`state`](DistributedSampler::state) was.
    pub fn load_state(&self, state: &SamplerState) {
        self.sampler().load_state(state);
    }

    fn sampler(&self) -> std::sync::MutexGuard<'_, DistributedSampler> {
        self.sampler.lock().expect("no panic under lock")
    }

    fn clamped(&self, items: usize) -> Range<usize> {
        self.range.start.min(items)..self.range.end.min(items)
    }

    /// The same for another device or range.
    fn with(&self, device: &Device, range: Range<usize>) -> Arc<dyn DataLoader<O>> {
        let sampler = Arc::new(Mutex::new(self.sampler().clone()));
        #[cfg(feature = "train")]
        super::made::note(&sampler);
        Arc::new(Self {
            dataset: self.dataset.clone(),
            batcher: self.batcher.clone(),
            sampler,
            batch_size: self.batch_size,
            device: device.clone(),
            range,
            workers: self.workers.iter().map(|_| Worker::default()).collect(),
        })
    }
}

impl<I, O> DataLoader<O> for DistributedLoader<I, O>
where
    I: Send + Sync + Clone + 'static,
    O: Send + 'static,
{
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        let indices = {
            let mut sampler = self.sampler();
            let indices = sampler.indices();
            let next = sampler.epoch + 1;
            sampler.set_epoch(next);
            indices
        };
        let indices = &indices[self.clamped(indices.len())];
        let batches: Vec<Vec<usize>> = indices.chunks(self.batch_size).map(<[_]>::to_vec).collect();
        let receivers = (0..self.workers.len())
            .map(|worker| {
                let own = batches.iter().skip(worker).step_by(self.workers.len());
                let own: Vec<Vec<usize>> = own.cloned().collect();
                let (dataset, batcher) = (self.dataset.clone(), self.batcher.clone());
                let device = self.device.clone();
                let (sender, receiver) = mpsc::sync_channel(AHEAD);
                let job = move || -> Result<(), DdpError> {
                    for indices in own {
                        let batch = make(&*dataset, &*batcher, indices, &device);
                        // Nobody wants the rest of the pass.
                        if sender.send(batch).is_err() {
                            break;
                        }
                    }
                    Ok(())
                };
                // Its end shows in the channel.
                drop(self.workers[worker].submit(job));
                receiver
            })
            .collect();
        Box::new(Pass {
            loader: self,
            total: indices.len(),
            batches,
            receivers,
            next: 0,
        })
    }

    fn num_items(&self) -> usize {
        let items = self.sampler().len();
        self.clamped(items).len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        self.with(device, self.range.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        let from = self.range.start;
        let end = from.saturating_add(end).min(self.range.end);
        self.with(&self.device, (from + start).min(end)..end)
    }
}

fn make<I, O>(
    dataset: &dyn Dataset<I>,
    batcher: &dyn Batcher<I, O>,
    indices: Vec<usize>,
    device: &Device,
) -> Result<O, DatasetError> {
    Ok(batcher.batch(dataset.get_many(indices)?, device))
}

/// One pass over the data.
struct Pass<'a, I, O> {
    loader: &'a DistributedLoader<I, O>,
    total: usize,
    batches: Vec<Vec<usize>>,
    /// One of each worker.
    receivers: Vec<Receiver<Result<O, DatasetError>>>,
    next: usize,
}

impl<I, O> Iterator for Pass<'_, I, O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let indices = std::mem::take(self.batches.get_mut(self.next)?);
        let number = self.next;
        self.next += 1;
        if self.receivers.is_empty() {
            let DistributedLoader {
                dataset,
                batcher,
                device,
                ..
            } = self.loader;
            return Some(make(&**dataset, &**batcher, indices, device));
        }
        let worker = number % self.receivers.len();
        let batch = self.receivers[worker].recv();
        Some(batch.unwrap_or_else(|_| {
            let problem = format!("data loading worker {worker} has panicked");
            Err(DatasetError::new(std::io::Error::other(problem)))
        }))
    }
}

impl<I, O> DataLoaderIterator<O> for Pass<'_, I, O> {
    fn progress(&self) -> Progress {
        let done = (self.next * self.loader.batch_size).min(self.total);
        Progress::new(done, self.total, Some("items".into()))
    }
}
