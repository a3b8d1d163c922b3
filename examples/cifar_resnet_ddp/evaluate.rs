//! Accuracy on the held-out images, each counted once over all ranks.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::Device;
use burn_ddp::{DistributedSampler, ProcessGroup, ReduceOp};
use examples::batch::Batcher;
use examples::images::Images;
use examples::resnet::ResNet;

use crate::error::Error;

/// Images a rank evaluates at a time.
const BATCH: usize = 128;

/// What the held-out images say of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeldOut {
    /// The mean loss.
    pub(crate) loss: f64,
    /// Images classified rightly.
    pub(crate) right: usize,
    /// All images.
    pub(crate) images: usize,
}

impl HeldOut {
    /// The part classified rightly, 0 to 1.
    pub(crate) fn accuracy(&self) -> f64 {
        self.right as f64 / self.images as f64
    }
}

/// Evaluates `model`: each rank takes its share of `images`, and the counts are summed over the ranks.
pub(crate) fn evaluate(
    model: &ResNet,
    images: &Images,
    batcher: &Batcher,
    device: &Device,
    group: &ProcessGroup,
) -> Result<HeldOut, Error> {
    let loss = CrossEntropyLossConfig::new().init(device);
    let share =
        DistributedSampler::evaluation(images.len(), group.rank(), group.world_size()).indices();
    // Loss, images classified rightly, images.
    let mut sums = [0.0, 0.0, share.len() as f64];
    for indices in share.chunks(BATCH) {
        let batch = batcher.eval(images, indices, device);
        let logits = model.forward(batch.images);
        let mean: f32 = loss
            .forward(logits.clone(), batch.labels.clone())
            .into_scalar();
        let right = logits
            .argmax(1)
            .squeeze_dim::<1>(1)
            .equal(batch.labels)
            .int()
            .sum();
        sums[0] += f64::from(mean) * indices.len() as f64;
        sums[1] += right.into_scalar::<i64>() as f64;
    }
    group.all_reduce(&mut sums, ReduceOp::Sum)?;
    let [loss, right, count] = sums;
    Ok(HeldOut {
        loss: loss / count,
        right: right as usize,
        images: count as usize,
    })
}
