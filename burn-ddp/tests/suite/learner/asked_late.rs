//! A stop that arrives while the ranks tell each other that none was asked to stop.

use std::{
    sync::{Arc, OnceLock, atomic::Ordering},
    thread,
    time::Duration,
};

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderIterator, Progress},
        dataset::DatasetError,
    },
    tensor::Device,
};
use burn_ddp::{DdpStrategy, DistributedSampler, ProcessGroup};
use burn_train::{Interrupter, SupervisedTraining};

use super::{
    device,
    program::{Batch, Falling, Log, Net, dealt, learner, with_log},
};
use crate::suite::ranks::locally;

/// Does something when its batches are at an end.
struct Ending {
    inner: Arc<dyn DataLoader<Batch>>,
    at_end: Arc<dyn Fn() + Send + Sync>,
}

impl DataLoader<Batch> for Ending {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        let batches = self.inner.iter();
        Box::new(Batches(batches, self.at_end.clone()))
    }

    fn num_items(&self) -> usize {
        self.inner.num_items()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self {
            inner: self.inner.to_device(device),
            at_end: self.at_end.clone(),
        })
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        self.inner.slice(start, end)
    }
}

struct Batches<'a>(
    Box<dyn DataLoaderIterator<Batch> + 'a>,
    Arc<dyn Fn() + Send + Sync>,
);

impl Iterator for Batches<'_> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.0.next();
        if batch.is_none() {
            (self.1)();
        }
        batch
    }
}

impl DataLoaderIterator<Batch> for Batches<'_> {
    fn progress(&self) -> Progress {
        self.0.progress()
    }
}

/// Rank 0's handle when its batches are at an end, and the number of calls it has made by then.
type Before = Arc<OnceLock<(ProcessGroup, u64)>>;

#[test]
fn all_ranks_make_the_last_step_or_none_does() {
    let (before, asked) = (Before::default(), Interrupter::new());
    let ends = locally(2, |group| {
        let group = group.with_timeout(Duration::from_secs(20));
        let (before, asked, own) = (before.clone(), asked.clone(), group.clone());
        let interrupter = match group.is_main() {
            true => asked.clone(),
            false => Interrupter::new(),
        };
        let at_end = move || match own.is_main() {
            true => {
                let calls = own.stats().calls;
                let _ = before.set((own.clone(), calls));
            }
            false => {
                // Rank 0 has said in its next call that nobody asked it to stop. Now someone does.
                let (first, calls) = before.wait();
                while first.stats().calls == *calls {
                    thread::yield_now();
                }
                asked.stop(Some("seen enough"));
            }
        };
        // Three batches an epoch, of which two are a step.
        let sampler = DistributedSampler::new(12, group.rank(), 2);
        let train = Ending {
            inner: dealt(12, 2, sampler.clone()),
            at_end: Arc::new(at_end),
        };
        let folder = tempfile::tempdir().unwrap();
        let rate = Falling::default();
        let valid = dealt(8, 2, DistributedSampler::new(8, group.rank(), 2));
        let training = SupervisedTraining::new(folder.path(), Arc::new(train), valid);
        let training = with_log(training, &Log::default())
            .num_epochs(50)
            .grads_accumulation(2)
            .with_interrupter(interrupter);
        let learner = learner(Net::new(0.0, 8, &device()), rate.clone());
        let result = DdpStrategy::new(&group, device()).launch(training, learner);
        assert!(result.error.is_none(), "{:?}", result.error);
        assert!(result.interrupted.is_some());
        rate.steps.load(Ordering::SeqCst)
    });
    assert_eq!(ends, [2, 2]);
}
