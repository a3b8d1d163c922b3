//! Evaluates models on the held-out images, each of which is counted once over all ranks.

use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::tensor::Device;
use burn_ddp::{DistributedSampler, ProcessGroup, ReduceOp};
use examples::batch::Batcher;
use examples::images::Images;
use examples::resnet::ResNet;

use crate::error::Error;

/// The number of images that a rank evaluates at a time.
const BATCH: usize = 128;

/// A model's results on the held-out images.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeldOut {
    /// The mean loss.
    pub(crate) loss: f64,
    /// The number of images that are classified correctly.
    pub(crate) right: usize,
    /// The number of all images.
    pub(crate) images: usize,
}

impl HeldOut {
    /// The fraction of images that is classified correctly, 0 to 1.
    pub(crate) fn accuracy(&self) -> f64 {
        self.right as f64 / self.images as f64
    }
}

/// Evaluates models: each rank takes its share of the images, and the counts are summed over the ranks.
pub(crate) struct Evaluator<'a> {
    images: &'a Images,
    share: Vec<usize>,
    batcher: Batcher,
    device: Device,
    group: &'a ProcessGroup,
    loss: CrossEntropyLoss,
}

impl<'a> Evaluator<'a> {
    pub(crate) fn new(
        images: &'a Images,
        batcher: Batcher,
        device: &Device,
        group: &'a ProcessGroup,
    ) -> Self {
        // Without autodiff.
        let device = device.clone().inner();
        let sampler =
            DistributedSampler::evaluation(images.len(), group.rank(), group.world_size());
        Self {
            images,
            share: sampler.indices(),
            batcher,
            loss: CrossEntropyLossConfig::new().init(&device),
            device,
            group,
        }
    }

    /// Evaluates a model that is the same on all ranks and not in training.
    pub(crate) fn evaluate(&self, model: &ResNet) -> Result<HeldOut, Error> {
        // The sum of losses, the number of correctly classified images, and the number of images.
        let mut sums = [0.0, 0.0, self.share.len() as f64];
        for indices in self.share.chunks(BATCH) {
            let batch = self.batcher.eval(self.images, indices, &self.device);
            let logits = model.forward(batch.images);
            let loss = self.loss.forward(logits.clone(), batch.labels.clone());
            let right = logits.argmax(1).squeeze_dim::<1>(1).equal(batch.labels);
            sums[0] += f64::from(loss.try_into_scalar::<f32>()?) * indices.len() as f64;
            sums[1] += right.int().sum().try_into_scalar::<i64>()? as f64;
        }
        self.group.all_reduce(&mut sums, ReduceOp::Sum)?;
        let [loss, right, images] = sums;
        Ok(HeldOut {
            loss: loss / images,
            right: right as usize,
            images: images as usize,
        })
    }
}
