//! Accuracy on the held-out images, each counted once over all ranks.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::Device;
use examples::batch::Batcher;
use examples::images::Images;
use examples::resnet::ResNet;

use crate::error::Error;
use crate::ranks::Ranks;

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

/// Evaluates `model`: rank r takes the images r, r + N, r + 2N, ... and the counts are summed over the ranks.
pub(crate) fn evaluate(
    model: &ResNet,
    images: &Images,
    batcher: &Batcher,
    device: &Device,
    ranks: &Ranks,
) -> Result<HeldOut, Error> {
    let loss = CrossEntropyLossConfig::new().init(device);
    let mine: Vec<usize> = (ranks.rank()..images.len())
        .step_by(ranks.count())
        .collect();
    let (mut loss_sum, mut right) = (0.0, 0);
    for indices in mine.chunks(BATCH) {
        let batch = batcher.eval(images, indices, device);
        let logits = model.forward(batch.images);
        let mean: f32 = loss
            .forward(logits.clone(), batch.labels.clone())
            .into_scalar();
        loss_sum += f64::from(mean) * indices.len() as f64;
        right += logits
            .argmax(1)
            .squeeze_dim::<1>(1)
            .equal(batch.labels)
            .int()
            .sum()
            .into_scalar::<i64>() as usize;
    }
    let [loss_sum, right, count] = ranks.sum([loss_sum, right as f64, mine.len() as f64])?;
    Ok(HeldOut {
        loss: loss_sum / count,
        right: right as usize,
        images: count as usize,
    })
}
