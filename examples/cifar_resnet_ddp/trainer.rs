//! One step: forward, backward, gradients averaged over the ranks, optimizer.

use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::module::ParamGroup;
use burn_amp::LossScaler;
use burn_ddp::{Ddp, ProcessGroup, ReduceOp};
use examples::batch::Batch;
use examples::resnet::ResNet;

use crate::error::Error;

/// A model and what trains it.
pub(crate) struct Trainer {
    pub(crate) model: ResNet,
    pub(crate) optimizer: ModuleOptimizer,
    /// With fp16.
    pub(crate) scaler: Option<LossScaler>,
    ddp: Ddp,
    group: ProcessGroup,
    loss: CrossEntropyLoss,
}

impl Trainer {
    /// Takes one step of `lr` by the mean loss of this rank's `batches` and those of the other ranks, which it
    /// returns. Where the scaled gradients overflow, the step is skipped on every rank: all see the same average.
    pub(crate) fn step(&mut self, batches: impl ExactSizeIterator<Item = Batch>, lr: f64) -> Result<f64, Error> {
        let count = batches.len() as f64;
        let mut gradients = GradientsAccumulator::new();
        let mut losses = Vec::with_capacity(batches.len());
        for batch in batches {
            let loss = self.loss.forward(self.model.forward(batch.images), batch.labels) / count;
            losses.push(loss.clone().detach());
            let loss = self.scaler.as_ref().map_or(loss.clone(), |scaler| scaler.scale(loss));
            gradients.accumulate(&self.model, GradientsParams::from_grads(loss.backward(), &self.model));
        }
        let gradients = self.ddp.average(&self.model, gradients.grads())?;
        self.update(lr, gradients);
        let mut loss = [losses.into_iter().map(|loss| f64::from(loss.into_scalar::<f32>())).sum()];
        self.group.all_reduce(&mut loss, ReduceOp::Mean)?;
        Ok(loss[0])
    }
}
