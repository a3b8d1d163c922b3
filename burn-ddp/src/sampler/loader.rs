//! A data loader whose batches come in the sampler's order, however many workers load them.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
};

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderIterator, Progress, batcher::Batcher},
        dataset::{Dataset, DatasetError},
    },
    tensor::Device,
};

use super::{DistributedSampler, SamplerState};
use crate::{Pending, group::Worker};

/// How many batches each worker loads ahead.
const AHEAD: usize = 2;

/// Burn's `DataLoader` over a rank's share of a dataset, for your own training loop or for burn-train.
///
/// Each pass ([`iter`](DataLoader::iter)) is one epoch of the sampler, and the next pass is the next epoch.
/// Batches come in the sampler's order whatever the number of workers, so that a run can be repeated and
/// resumed: worker `w` of `n` loads batches `w`, `w + n`, and so on, and the workers are read in turn. (Burn's
/// own loader, with several workers, returns batches as they become ready.)
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
    /// The sampler with the epoch and skip of the latest pass.
    begun: Mutex<Option<DistributedSampler>>,
    batch_size: usize,
    drop_last: bool,
    device: Device,
    /// Which positions among the rank's items to load.
    range: Range<usize>,
    /// The workers live as long as the loader, because a thread that uses a GPU holds a stream of it.
    workers: Vec<Worker>,
}

impl<I, O> DistributedLoader<I, O>
where
    I: Send + Sync + Clone + 'static,
    O: Send + 'static,
{
    /// A loader with batches of one item, on the default device, without workers.
    ///
    /// # Panics
    ///
    /// Panics if the dataset does not match the sampler: see [`DistributedSampler::shard`].
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
            begun: Mutex::default(),
            batch_size: 1,
            drop_last: false,
            device: Device::default(),
            range: 0..usize::MAX,
            workers: Vec::new(),
        }
    }

    /// The number of items in a batch. The last batch of an epoch may have fewer, unless it is [dropped](Self::drop_last).
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

    /// Whether to leave out the last batch of a pass if it is not full, as PyTorch's `DataLoader(drop_last=True)` does, so that all
    /// batches have the same shape. Default: no.
    ///
    /// This is about the batches of each rank; [`DistributedSampler::drop_last`] is about the items that remain when all ranks have
    /// equally many. A rank's last items are then in no batch of that epoch, so leave them in for an evaluation.
    ///
    /// ```
    /// # use burn::data::{dataloader::{DataLoader, batcher::Batcher}, dataset::InMemDataset};
    /// # use burn::tensor::Device;
    /// use burn_ddp::{DistributedLoader, DistributedSampler};
    ///
    /// # struct Numbers;
    /// # impl Batcher<i32, Vec<i32>> for Numbers {
    /// #     fn batch(&self, items: Vec<i32>, _device: &Device) -> Vec<i32> { items }
    /// # }
    /// let dataset = InMemDataset::new((0..10).collect::<Vec<i32>>());
    /// let loader = DistributedLoader::new(dataset, Numbers, DistributedSampler::new(10, 0, 2))
    ///     .batch_size(2)
    ///     .drop_last(true);
    /// let batches: Vec<Vec<i32>> = loader.iter().map(Result::unwrap).collect();
    /// assert_eq!(batches, [[0, 2], [4, 6]]); // without 8
    /// assert_eq!(loader.num_items(), 4);
    /// ```
    #[must_use]
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// The number of threads that load items and build batches. With 0, the calling thread does.
    #[must_use]
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.workers = (0..num_workers).map(|_| Worker::default()).collect();
        self
    }

    /// The device on which batches are created.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Sets the epoch of the next pass. If it already is that epoch, items to be [skipped](Self::skip) still are.
    pub fn set_epoch(&self, epoch: u64) {
        self.sampler().set_epoch(epoch);
    }

    /// Skips this rank's first `items` items of the next pass: see [`DistributedSampler::skip`].
    pub fn skip(&self, items: usize) {
        self.sampler().skip(items);
        self.turn_to_next();
    }

    /// The state after this rank has taken `items` items of the latest pass (its
    /// [`progress`](DataLoaderIterator::progress) tells how many), and each other rank as many. After
    /// [`load_state`](Self::load_state) or [`skip`](Self::skip), of the next pass.
    ///
    /// ```
    /// # use burn::data::{dataloader::{DataLoader, batcher::Batcher}, dataset::InMemDataset};
    /// # use burn::tensor::Device;
    /// use burn_ddp::{DistributedLoader, DistributedSampler};
    ///
    /// # struct Numbers;
    /// # impl Batcher<i32, Vec<i32>> for Numbers {
    /// #     fn batch(&self, items: Vec<i32>, _device: &Device) -> Vec<i32> { items }
    /// # }
    /// # let loader = || {
    /// #     let dataset = InMemDataset::new((0..6).collect::<Vec<i32>>());
    /// #     DistributedLoader::new(dataset, Numbers, DistributedSampler::new(6, 0, 1)).batch_size(2)
    /// # };
    /// let before = loader();
    /// let mut pass = before.iter();
    /// pass.next().unwrap()?;
    /// let state = before.state(pass.progress().items_processed); // for a checkpoint
    ///
    /// let after = loader();
    /// after.load_state(&state);
    /// for epoch in state.epoch..3 {
    ///     after.set_epoch(epoch);
    ///     let items: Vec<i32> = after.iter().flat_map(Result::unwrap).collect();
    ///     assert_eq!(items, if epoch == 0 { vec![2, 3, 4, 5] } else { vec![0, 1, 2, 3, 4, 5] });
    /// }
    /// # Ok::<(), burn::data::dataset::DatasetError>(())
    /// ```
    pub fn state(&self, items: usize) -> SamplerState {
        let begun = self.begun.lock().expect("no panic under lock");
        match &*begun {
            Some(sampler) => sampler.state(items),
            None => self.sampler().state(items),
        }
    }

    /// Makes the next pass continue at a saved [`state`](Self::state).
    pub fn load_state(&self, state: &SamplerState) {
        self.sampler().load_state(state);
        self.turn_to_next();
    }

    /// Has [`state`](Self::state) be that of the next pass.
    fn turn_to_next(&self) {
        *self.begun.lock().expect("no panic under lock") = None;
    }

    fn sampler(&self) -> MutexGuard<'_, DistributedSampler> {
        self.sampler.lock().expect("no panic under lock")
    }

    /// The positions of the items that a pass loads, of so many.
    fn loaded(&self, items: usize) -> Range<usize> {
        let range = self.range.start.min(items)..self.range.end.min(items);
        let surplus = match self.drop_last {
            true => range.len() % self.batch_size,
            false => 0,
        };
        range.start..range.end - surplus
    }

    /// The same loader for another device or range.
    fn with(&self, device: &Device, range: Range<usize>) -> Arc<dyn DataLoader<O>> {
        let sampler = Arc::new(Mutex::new(self.sampler().clone()));
        #[cfg(feature = "train")]
        super::made::note(&sampler);
        Arc::new(Self {
            dataset: self.dataset.clone(),
            batcher: self.batcher.clone(),
            sampler,
            begun: Mutex::default(),
            batch_size: self.batch_size,
            drop_last: self.drop_last,
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
        let sampler = {
            let mut next = self.sampler();
            let sampler = next.clone();
            next.set_epoch(sampler.epoch + 1);
            sampler
        };
        let indices = sampler.indices();
        *self.begun.lock().expect("no panic under lock") = Some(sampler);
        let indices = &indices[self.loaded(indices.len())];
        let mut pass = Pass {
            loader: self,
            total: indices.len(),
            batches: indices.chunks(self.batch_size).map(<[_]>::to_vec).collect(),
            ahead: VecDeque::new(),
            submitted: 0,
            taken: 0,
            wanted: Arc::new(()),
        };
        for _ in 0..AHEAD * self.workers.len() {
            pass.submit();
        }
        Box::new(pass)
    }

    fn num_items(&self) -> usize {
        let items = self.sampler().len();
        self.loaded(items).len()
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

/// One pass over the data. It gives each worker only a few batches at a time, because other passes may use the same workers.
struct Pass<'a, I, O> {
    loader: &'a DistributedLoader<I, O>,
    total: usize,
    /// The indices of each batch; emptied when the batch is submitted or loaded.
    batches: Vec<Vec<usize>>,
    /// Batches that the workers are loading, in order.
    ahead: VecDeque<Pending<Result<O, DatasetError>>>,
    submitted: usize,
    taken: usize,
    /// Dropped with the pass: workers then skip batches that were submitted but not started.
    wanted: Arc<()>,
}

impl<I, O> Pass<'_, I, O>
where
    I: Send + Sync + Clone + 'static,
    O: Send + 'static,
{
    /// Submits the next batch to its worker.
    fn submit(&mut self) {
        let Some(indices) = self.batches.get_mut(self.submitted).map(std::mem::take) else {
            return;
        };
        let DistributedLoader {
            dataset,
            batcher,
            device,
            workers,
            ..
        } = self.loader;
        let worker = &workers[self.submitted % workers.len()];
        let (dataset, batcher) = (dataset.clone(), batcher.clone());
        let (device, wanted) = (device.clone(), Arc::downgrade(&self.wanted));
        self.submitted += 1;
        self.ahead.push_back(worker.submit(move || {
            Ok(match wanted.strong_count() {
                0 => Err(failed("nobody wants this batch".into())),
                _ => make(&*dataset, &*batcher, indices, &device),
            })
        }));
    }
}

fn failed(problem: String) -> DatasetError {
    DatasetError::new(std::io::Error::other(problem))
}

impl<I, O> Iterator for Pass<'_, I, O>
where
    I: Send + Sync + Clone + 'static,
    O: Send + 'static,
{
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let indices = self.batches.get_mut(self.taken)?;
        let number = self.taken;
        self.taken += 1;
        let workers = self.loader.workers.len();
        if workers == 0 {
            let indices = std::mem::take(indices);
            let DistributedLoader {
                dataset,
                batcher,
                device,
                ..
            } = self.loader;
            return Some(make(&**dataset, &**batcher, indices, device));
        }
        let batch = self.ahead.pop_front()?;
        self.submit();
        Some(batch.wait().unwrap_or_else(|_| {
            let worker = number % workers;
            Err(failed(format!("data loading worker {worker} has panicked")))
        }))
    }
}

impl<I, O> DataLoaderIterator<O> for Pass<'_, I, O>
where
    I: Send + Sync + Clone + 'static,
    O: Send + 'static,
{
    fn progress(&self) -> Progress {
        let done = (self.taken * self.loader.batch_size).min(self.total);
        Progress::new(done, self.total, Some("items".into()))
    }
}
