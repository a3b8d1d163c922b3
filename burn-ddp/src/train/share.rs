//! A rank's share of the items of a data loader.

use std::sync::Arc;

use burn::{data::dataloader::DataLoader, tensor::Device};

use crate::{
    DdpError, ProcessGroup, ReduceOp,
    sampler::made::{SharedSampler, watch},
};

/// The items that this rank loads.
pub(super) struct Share<O> {
    pub(super) loader: Arc<dyn DataLoader<O>>,
    /// The number of items of all ranks.
    pub(super) total: usize,
    sampler: Option<SharedSampler>,
}

impl<O> Share<O> {
    /// This rank's share of a loader: for a [`DistributedLoader`](crate::DistributedLoader), the items that its
    /// sampler gives this rank; all items if they have been `dealt` otherwise; else a slice, in which ranks
    /// differ by at most one item.
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
                let sampler = sampler.lock().expect("no panic under lock");
                sampler.check_place(group)?;
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

    /// The same, without items that are repeated to give all ranks the same number.
    pub(super) fn each_once(self, group: &ProcessGroup) -> Result<Self, DdpError> {
        if let Some(sampler) = &self.sampler {
            let mut sampler = sampler.lock().expect("no panic under lock");
            *sampler = sampler.clone().each_once();
        }
        self.count(group)
    }

    /// Checks the epoch, counted from 0, with which a training starts: a sampler in the middle of an epoch must
    /// continue in that epoch.
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

    /// Selects the order of an epoch, counted from 0. Has no effect on loaders other than `DistributedLoader`.
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
