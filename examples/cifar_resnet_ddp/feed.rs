//! Chooses the images of a step.

use burn::tensor::Device;
use burn_ddp::{DistributedSampler, ProcessGroup};
use examples::batch::{Batch, Batcher};
use examples::images::Images;

use crate::cli::Args;
use crate::setup::Steps;

/// This rank's share of the training images, step by step. It depends on the seed and the step alone, so that a
/// run can resume from any step.
pub(crate) struct Feed<'a> {
    images: &'a Images,
    batcher: Batcher,
    device: Device,
    sampler: DistributedSampler,
    batch_size: usize,
    accumulate: usize,
    steps_per_epoch: usize,
    /// The current epoch, and this rank's images in the epoch's order.
    order: Option<(usize, Vec<usize>)>,
}

impl<'a> Feed<'a> {
    pub(crate) fn new(
        args: &Args,
        images: &'a Images,
        batcher: Batcher,
        device: &Device,
        steps: Steps,
        group: &ProcessGroup,
    ) -> Self {
        Self {
            images,
            batcher,
            device: device.clone(),
            sampler: DistributedSampler::new(images.len(), group.rank(), group.world_size())
                .shuffle(true)
                .seed(args.seed)
                .drop_last(true),
            batch_size: args.batch_size,
            accumulate: args.accumulate,
            steps_per_epoch: steps.per_epoch,
            order: None,
        }
    }

    /// The batches of `step`: one, or as many as are accumulated.
    pub(crate) fn batches(&mut self, step: usize) -> impl ExactSizeIterator<Item = Batch> {
        let (epoch, step) = (step / self.steps_per_epoch, step % self.steps_per_epoch);
        if self
            .order
            .as_ref()
            .is_none_or(|(ordered, _)| *ordered != epoch)
        {
            self.sampler.set_epoch(epoch as u64);
            self.order = Some((epoch, self.sampler.indices()));
        }
        let feed: &Self = self;
        let (_, order) = feed.order.as_ref().expect("an order was just drawn");
        let images = feed.batch_size * feed.accumulate;
        order[step * images..(step + 1) * images]
            .chunks(feed.batch_size)
            .map(move |indices| {
                feed.batcher
                    .train(feed.images, indices, epoch, &feed.device)
            })
    }
}
