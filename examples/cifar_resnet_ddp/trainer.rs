//! One step: forward, backward, gradients averaged over the ranks, optimizer.

use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_ddp::{ProcessGroup, ReduceOp};
use examples::batch::Batch;
use examples::resnet::ResNet;

use crate::cli::Args;
use crate::error::Error;
use crate::setup::Setup;

/// A model and what trains it.
pub(crate) struct Trainer {
    pub(crate) model: ResNet,
    pub(crate) optimizer: ModuleOptimizer,
    group: ProcessGroup,
    loss: CrossEntropyLoss,
}

impl Trainer {
    /// A new model, or that of the checkpoint in `setup`, on `device`.
    pub(crate) fn new(
        args: &Args,
        setup: &Setup,
        device: &Device,
        group: &ProcessGroup,
    ) -> Result<Self, Error> {
        device.seed(args.seed);
        let mut model = args.network().init(device);
        let mut optimizer = sgd(args.weight_decay);
        if let Some((checkpoint, _)) = &setup.resume {
            (model, optimizer) = checkpoint.load(model, optimizer)?;
        }
        Ok(Self {
            model,
            optimizer,
            group: group.clone(),
            loss: CrossEntropyLossConfig::new().init(device),
        })
    }

    /// Takes one step of `lr` down the mean loss of this rank's `batches` and those of the other ranks; returns that
    /// loss.
    pub(crate) fn step(
        &mut self,
        batches: impl ExactSizeIterator<Item = Batch>,
        lr: f64,
    ) -> Result<f64, Error> {
        let count = batches.len() as f64;
        let mut gradients = GradientsAccumulator::new();
        let mut losses = Vec::with_capacity(batches.len());
        for batch in batches {
            let loss = self
                .loss
                .forward(self.model.forward(batch.images), batch.labels)
                / count;
            losses.push(loss.clone().detach());
            gradients.accumulate(
                &self.model,
                GradientsParams::from_grads(loss.backward(), &self.model),
            );
        }
        let mut gradients = gradients.grads();
        let mut average = Average {
            group: &self.group,
            gradients: &mut gradients,
            result: Ok(()),
        };
        self.model.visit(&mut average);
        average.result?;
        self.model = self.optimizer.step(lr, self.model.clone(), gradients);
        let mut loss = [losses
            .into_iter()
            .map(|loss| f64::from(loss.into_scalar::<f32>()))
            .sum::<f64>()];
        self.group.all_reduce(&mut loss, ReduceOp::Mean)?;
        Ok(loss[0])
    }
}

struct Average<'a> {
    group: &'a ProcessGroup,
    gradients: &'a mut GradientsParams,
    result: Result<(), Error>,
}

impl ModuleVisitor for Average<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let device = gradient.device();
            let shape = gradient.shape();
            let mut values: Vec<f32> = gradient.into_data().try_to_vec().unwrap();
            if let Err(error) = self.group.all_reduce(&mut values, ReduceOp::Mean) {
                self.result = Err(error.into());
            }
            self.gradients.register(
                param.id,
                Tensor::<D>::from_data(TensorData::new(values, shape), &device),
            );
        }
    }
}

/// SGD with momentum. Norms and biases are not decayed (Goyal et al. 2017, section 5.3).
fn sgd(weight_decay: f64) -> ModuleOptimizer {
    let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.0);
    let sgd = SgdConfig::new().with_momentum(Some(momentum));
    let decayed = sgd
        .clone()
        .with_weight_decay(Some(WeightDecayConfig::new(weight_decay as f32)));
    let undecayed = ParamGroup::from_any_predicates(vec!["gamma", "beta", "bias"]);
    ModuleOptimizer::from(decayed.build()).with_group(undecayed, sgd.build(), None)
}
