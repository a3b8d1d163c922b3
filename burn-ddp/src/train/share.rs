//! A rank's share of what a data loader loads.

use std::sync::Arc;

use burn::{data::dataloader::DataLoader, tensor::Device};

use crate::{
    DdpError, ProcessGroup, ReduceOp,
    sampler::made::{SharedSampler, watch},
};

/// What this rank loads.
pub(super) struct Share<O> {
    pub(super) loader: Arc<dyn DataLoader<O>>,
    /// Items of all ranks.
    pub(super) total: usize,
    sampler: Option<SharedSampler>,
}

impl<O> Share<O> {
    /// This rank's share of a loader: what its sampler deals out to this rank if it is a
    /// [`DistributedLoader`](crate::DistributedLoader); all of it if it has been `dealt` otherwise; else a
    /// slice, as many items as the other ranks have or one less.
    pub(super) fn new(
        loader: Arc<dyn DataLoader<O>>,
        group: &ProcessGroup,
        device: &Device,
        dealt: bool,
    ) -> Result<Self, DdpError> {
        let (rank, ranks) = (group.rank(), group.world_size());
        let (moved, sampler) = watch(|| loader.to_device(device));
        let loader = match &sampler {
            Some(sampler) => {
                let place = sampler.lock().expect("no panic under lock").place();
                if place != (rank, ranks) {
                    return Err(DdpError::InvalidArgument(format!(
                        "the loader's sampler is that of rank {} of {}; expected rank {rank} of {ranks}",
                        place.0, place.1
                    )));
                }
                moved
            }
            None if dealt || ranks == 1 => moved,
            None => {
                let (width, surplus) = (loader.num_items() / ranks, loader.num_items() % ranks);
                let at = |rank: usize| rank * width + rank.min(surplus);
                loader.slice(at(rank), at(rank + 1)).to_device(device)
            }
        };
        Self {
            loader,
            total: 0,
            sampler,
        }
        .count(group)
    }

    /// The same, with no item repeated to even the ranks out.
    pub(super) fn each_once(self, group: &ProcessGroup) -> Result<Self, DdpError> {
        if let Some(sampler) = &self.sampler {
            let mut sampler = sampler.lock().expect("no panic under lock");
            *sampler = sampler.clone().each_once();
        }
        self.count(group)
    }

    /// Checks that a sampler which is to go on in the middle of an epoch does so in the one that a training
    /// starts with, counted from 0.
    pub(super) fn starts_with(&self, epoch: usize) -> Result<(), DdpError> {
        let Some(sampler) = &self.sampler else {
            return Ok(());
        };
        let state = sampler.lock().expect("no panic under lock").state(0);
        match state.taken == 0 || state.epoch == epoch as u64 {
            true => Ok(()),
            false => Err(DdpError::InvalidArgument(format!(
                "the loader goes on in the middle of epoch {}, but the training starts with epoch {epoch} \
                 (both counted from 0); resume from the checkpoint that its state belongs to",
                state.epoch
            ))),
        }
    }

    /// Selects the order of an epoch, counted from 0. Other loaders than ours go their own ways.
    pub(super) fn of_epoch(self, epoch: usize, group: &ProcessGroup) -> Result<Self, DdpError> {
        if let Some(sampler) = &self.sampler {
            let mut sampler = sampler.lock().expect("no panic under lock");
            sampler.set_epoch(epoch as u64);
        }
        self.count(group)
    }

    fn count(mut self, group: &ProcessGroup) -> Result<Self, DdpError> {
        let mut items = [self.loader.num_items() as u64];
        group.all_reduce(&mut items, ReduceOp::Sum)?;
        self.total = items[0] as usize;
        Ok(self)
    }
}
