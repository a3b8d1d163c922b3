//! A single training step: forward, backward, averaging of gradients over the ranks, optimizer.

use std::sync::Arc;

use burn::module::{Module, ParamGroup};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn_amp::{LossScaler, LossScalerConfig};
use burn_ddp::{Checkpoints, Ddp, ProcessGroup, ReduceOp};
use burn_fp8::{recipe::DelayedScaling, share_amaxes};
use examples::batch::Batch;
use examples::resnet::ResNet;

use crate::checkpoint::{self, State};
use crate::cli::{Args, Precision};
use crate::device::Compute;
use crate::error::Error;
use crate::setup::{Settings, Setup};

/// A model, and everything that trains it.
pub(crate) struct Trainer {
    model: ResNet,
    optimizer: ModuleOptimizer,
    /// Only with fp16.
    scaler: Option<LossScaler>,
    ddp: Ddp,
    group: ProcessGroup,
    /// The group of the normalization layers, which may communicate at the same time as gradients.
    norm_group: ProcessGroup,
    /// The group in which fp8 layers share their amaxes, with fp8.
    amax_group: Option<Arc<ProcessGroup>>,
    loss: CrossEntropyLoss,
}

impl Trainer {
    /// Creates a new model, or loads that of the checkpoint in `setup`. It is the same on all ranks.
    pub(crate) fn new(
        args: &Args,
        setup: &Setup,
        compute: &mut Compute,
        group: &ProcessGroup,
    ) -> Result<Self, Error> {
        let device = &compute.device;
        device.seed(args.seed);
        let norm_group = group.duplicate()?;
        let mut model = args.network().init(device);
        if !args.no_sync_bn {
            model = model.with_sync_batch_norm(&norm_group);
        }
        let amax_group = match args.precision {
            Precision::Fp8 => Some(Arc::new(group.duplicate()?)),
            _ => None,
        };
        if let Some(reducer) = amax_group.clone() {
            model = model.with_fp8_head(DelayedScaling::new(), reducer)?;
        }
        let mut optimizer = sgd(args.weight_decay);
        let mut scaler = match args.precision {
            Precision::Fp16 => Some(LossScalerConfig::new().init()?),
            _ => None,
        };
        if let Some((checkpoint, state)) = &setup.resume {
            (model, optimizer) = checkpoint::load(checkpoint, model, optimizer)?;
            if let (Some(new), Some(state)) = (scaler.take(), &state.scaler) {
                scaler = Some(new.load_state(state.clone())?);
            }
        }
        let loss = CrossEntropyLossConfig::new().init(device);
        let ddp = compute.ddp(group, &model)?;
        Ok(Self {
            model: ddp.broadcast_parameters(model)?,
            optimizer,
            scaler,
            ddp,
            group: group.clone(),
            norm_group,
            amax_group,
            loss,
        })
    }

    /// Takes one optimizer step with the learning rate `lr`, on the mean loss of this rank's `batches` and those of the other
    /// ranks. Returns that loss.
    pub(crate) fn step(
        &mut self,
        batches: impl ExactSizeIterator<Item = Batch>,
        lr: f64,
    ) -> Result<f64, Error> {
        let count = batches.len() as f64;
        let mut gradients = GradientsAccumulator::new();
        let mut losses = Vec::with_capacity(batches.len());
        let mut pass = |batch: Batch| {
            let logits = self.model.forward(batch.images);
            let loss = self.loss.forward(logits, batch.labels) / count;
            losses.push(loss.clone().detach());
            let loss = match &self.scaler {
                Some(scaler) => scaler.scale(loss),
                None => loss,
            };
            let new = GradientsParams::from_grads(loss.backward(), &self.model);
            gradients.accumulate(&self.model, new);
        };
        // Gradients of several batches are averaged once, as a sum.
        match batches.len() {
            1 => batches.for_each(pass),
            _ => self.ddp.no_sync(|_| batches.for_each(&mut pass)),
        }
        let gradients = self.ddp.reduce_gradients(gradients.grads(), &self.model)?;
        self.update(lr, gradients);
        let mut loss = [0.0];
        for part in losses {
            loss[0] += f64::from(part.try_into_scalar::<f32>()?);
        }
        self.group.all_reduce(&mut loss, ReduceOp::Mean)?;
        Ok(loss[0])
    }

    /// Steps the optimizer. If scaled gradients overflowed, all ranks skip the step, because they have the same averages.
    fn update(&mut self, lr: f64, gradients: GradientsParams) {
        let model = self.model.clone();
        self.model = match &mut self.scaler {
            Some(scaler) => scaler.step(&mut self.optimizer, lr, model, gradients).0,
            None => self.optimizer.step(lr, model, gradients),
        };
    }

    /// The model as trained so far.
    pub(crate) fn model(&self) -> &ResNet {
        &self.model
    }

    /// The model to evaluate, which is the same on all ranks: running statistics that are not synchronized are taken from rank 0.
    pub(crate) fn valid_model(&self) -> Result<ResNet, Error> {
        let model = self.model.clone();
        Ok(self.ddp.broadcast_parameters(model)?.valid())
    }

    /// Writes the checkpoint of `step`. All ranks call this.
    pub(crate) fn save(
        &self,
        checkpoints: &Checkpoints,
        step: usize,
        accuracy: Option<f64>,
        settings: &Settings,
    ) -> Result<(), Error> {
        // The amaxes of the last step are this rank's own until the next step, but all ranks resume from rank 0's.
        let model = match &self.amax_group {
            Some(group) => &share_amaxes(self.model.clone(), &**group).map_err(Error::Amaxes)?,
            None => &self.model,
        };
        let state = State {
            settings: settings.clone(),
            scaler: self.scaler.as_ref().map(|scaler| scaler.state().clone()),
        };
        checkpoint::save(checkpoints, step, accuracy, model, &self.optimizer, &state)?;
        Ok(())
    }

    /// The number of bytes that were all-reduced so far: of gradients, statistics and losses.
    pub(crate) fn bytes_reduced(&self) -> u64 {
        let groups = [&self.group, &self.norm_group];
        let others: u64 = groups.iter().map(|group| group.stats().bytes_reduced).sum();
        self.ddp.stats().bytes_reduced + others
    }
}

/// SGD with momentum. Norms and biases have no weight decay (Goyal et al. 2017, section 5.3).
fn sgd(weight_decay: f64) -> ModuleOptimizer {
    let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.0);
    let sgd = SgdConfig::new().with_momentum(Some(momentum));
    let decay = WeightDecayConfig::new(weight_decay as f32);
    let decayed = sgd.clone().with_weight_decay(Some(decay));
    let undecayed = ParamGroup::from_any_predicates(vec!["gamma", "beta", "bias"]);
    ModuleOptimizer::from(decayed.build()).with_group(undecayed, sgd.build(), None)
}
