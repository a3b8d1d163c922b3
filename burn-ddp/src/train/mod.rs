//! burn-train's `Learner` over a process group.

mod checkpointer;
mod errors_shown;
mod fit;
mod gather;
mod passes;
mod share;

use std::{error::Error, sync::Arc};

use burn::{data::dataset::DatasetError, tensor::Device};
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerModel, LearningResult,
    SupervisedLearningStrategy, SupervisedTraining, SupervisedTrainingEventProcessor, TrainLoader,
    TrainStep, TrainingComponents, TrainingError, TrainingStrategy, ValidLoader,
    renderer::CliMetricsRenderer,
};

pub use self::{
    checkpointer::{AtomicCheckpointer, EpochCheckpoints},
    gather::GatherOutput,
};
use self::{errors_shown::ErrorsShown, fit::Fit};
use crate::{Ddp, DdpConfig, DdpError, Overlap, ProcessGroup, ddp::Part};

/// Trains burn-train's `Learner` on all ranks of a group. Each rank runs the same program.
///
/// ```
/// use burn::{
///     data::{dataloader::batcher::Batcher, dataset::InMemDataset},
///     lr_scheduler::constant::ConstantLr,
///     module::Module,
///     nn::{Linear, LinearConfig},
///     optim::SgdConfig,
///     tensor::{Device, Tensor, TensorData},
/// };
/// use burn_ddp::{DdpStrategy, DistributedLoader, DistributedSampler, ProcessGroup};
/// use burn_train::{
///     InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
///     metric::LossMetric,
/// };
/// use std::sync::Arc;
///
/// #[derive(Module, Debug)]
/// struct Net {
///     linear: Linear,
/// }
///
/// impl TrainStep for Net {
///     type Input = Tensor<2>;
///     type Output = RegressionOutput;
///
///     fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
///         let output = InferenceStep::step(self, batch);
///         TrainOutput::new(self, output.loss.backward(), output)
///     }
/// }
///
/// impl InferenceStep for Net {
///     type Input = Tensor<2>;
///     type Output = RegressionOutput;
///
///     fn step(&self, batch: Tensor<2>) -> RegressionOutput {
///         let output = self.linear.forward(batch.clone());
///         let loss = (output.clone() - batch.clone()).powi_scalar(2).mean();
///         RegressionOutput::new(loss, output, batch)
///     }
/// }
///
/// struct Rows;
///
/// impl Batcher<f32, Tensor<2>> for Rows {
///     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
///         let len = items.len();
///         Tensor::from_data(TensorData::new(items, [len, 1]), device)
///     }
/// }
///
/// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?
/// let device = Device::flex().autodiff();
/// let loader = |sampler| {
///     let dataset = InMemDataset::new(vec![0.1, 0.2, 0.3, 0.4, 0.5]);
///     Arc::new(DistributedLoader::new(dataset, Rows, sampler).batch_size(2))
/// };
/// let train = DistributedSampler::new(5, group.rank(), group.world_size()).shuffle(true);
/// let valid = DistributedSampler::evaluation(5, group.rank(), group.world_size());
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// let training = SupervisedTraining::new(folder, loader(train), loader(valid))
///     .metrics((LossMetric::new(),))
///     .num_epochs(2);
/// # let training = training.with_application_logger(None);
/// let model = Net { linear: LinearConfig::new(1, 1).init(&device) };
/// let learner = Learner::new(model, SgdConfig::new().init(), ConstantLr::new(0.1));
///
/// let result = DdpStrategy::new(&group, device).launch(training, learner);
/// if let Some(fault) = DdpStrategy::fault(&result) {
///     eprintln!("{fault}"); // "rank 3 died: ...", for instance
/// }
/// ```
///
/// **Model.** The models of all ranks are compared at the start, and made equal to rank 0's. Between `TrainStep::step`
/// and `TrainStep::optimize`, gradients are averaged as by [`Ddp`]; with an [`overlap`](Self::overlap), while backward
/// still runs. Gradients that the `Learner` accumulates are summed without dividing, as in burn-train, and averaged
/// once. Each validation and each checkpoint uses the buffers of rank 0, such as running statistics. The amaxes of fp8 layers are among
/// them: their first scales after a resume lack what the other ranks saw in the last step.
///
/// **Data.** A [`DistributedLoader`](crate::DistributedLoader) gives each rank the items of its sampler. Epoch `n` of
/// the training, counted from 1, is the sampler's epoch `n - 1`, also after a resume. If the sampler is in the
/// [middle](crate::DistributedLoader::load_state) of an epoch, the training's first epoch continues there, and must be
/// that epoch. Of any other loader, each rank takes its own slice, as with burn-train's own strategies: a loader that
/// is only known as a `dyn DataLoader` can be sliced, but neither asked for its items nor given an order. Ranks may
/// have different numbers of batches; a rank without a batch counts as having gradients of zero (see [`Ddp::join`]).
///
/// **Metrics.** burn-train computes metrics from the outputs of steps, in one place. So outputs are sent to rank 0
/// ([`GatherOutput`]), whose metrics see the outputs of all ranks, one rank's batch after the other. In validation,
/// each item counts once, even if samplers pad. In training, an item that is repeated to give all ranks the same number
/// is trained on twice, and counts twice. Metrics of the machine (memory, temperature) are rank 0's. If outputs are
/// large, [`gather_training(false)`](Self::gather_training), which describes the cost, turns this off for training.
///
/// **Rank 0** alone renders, logs, writes checkpoints and decides about early stopping; the others wait for its
/// checkpoints, and stop with it. A stop that is requested on any rank (`Interrupter::stop`) stops all of them after
/// the same step. To resume (`SupervisedTraining::checkpoint`), all ranks must see the folder of the checkpoints.
/// burn-train writes checkpoints in place; with [`EpochCheckpoints`] (`SupervisedTraining::with_custom_checkpointers`),
/// the three files of an epoch are either all there and belong together, or the epoch is not there. They are written while
/// the next epoch trains, from what rank 0 has read into the host's memory before: from its first checkpoint on, CubeCL's
/// devices read all tensors of the process when they are asked to (`RuntimeKind::Async`), not when bytes are first used. A
/// model that draws random numbers (`Dropout`) needs a [`seed`](Self::seed) to continue as if it had not stopped.
///
/// **Faults.** If a rank fails, `launch` returns on all others, with the fault in `LearningResult::error`: see
/// [`fault`](Self::fault). burn-train shows it as a dataset error, which is the only kind that can contain another error.
#[derive(Clone, Debug)]
#[must_use]
pub struct DdpStrategy {
    group: ProcessGroup,
    device: Device,
    config: DdpConfig,
    overlap: Option<Overlap>,
    gather_training: bool,
    dealt: bool,
    seed: Option<u64>,
}

impl DdpStrategy {
    /// Trains on `device`, with gradients averaged after backward. The device determines autodiff and gradient
    /// checkpointing (`SupervisedTraining::gradient_checkpointing` is for burn-train's own strategies);
    /// autodiff is added if it is missing.
    pub fn new(group: &ProcessGroup, device: Device) -> Self {
        Self {
            group: group.clone(),
            device: match device.is_autodiff() {
                true => device,
                false => device.autodiff(),
            },
            config: DdpConfig::new(),
            overlap: None,
            gather_training: true,
            dealt: false,
            seed: None,
        }
    }

    /// Settings for averaging after backward. With an [`overlap`](Self::overlap), that one's settings apply instead.
    pub fn config(mut self, config: DdpConfig) -> Self {
        self.config = config;
        self
    }

    /// Averages gradients while backward still runs. The device must have the layer of `overlap`.
    pub fn overlap(mut self, overlap: Overlap) -> Self {
        self.overlap = Some(overlap);
        self
    }

    /// Whether the outputs of training steps are sent to rank 0. Default: yes, so that training metrics cover all items.
    ///
    /// In each step, this makes every rank wait for its device, and sends everything that [`GatherOutput`] reads
    /// (for a `ClassificationOutput`: the loss, the logits and the targets) from each rank to rank 0, which uploads
    /// it to its device again and computes the metrics of all ranks. This is cheap for a classifier's logits, and
    /// expensive for logits over a vocabulary at every token. Turned off, training metrics cover rank 0's share of
    /// the data, and no rank waits for its device to read outputs. Validation gathers in either case.
    ///
    /// ```
    /// # use burn::tensor::Device;
    /// # use burn_ddp::{DdpStrategy, ProcessGroup};
    /// # let group = ProcessGroup::single();
    /// let strategy = DdpStrategy::new(&group, Device::flex()).gather_training(false);
    /// # let _ = strategy;
    /// ```
    pub fn gather_training(mut self, gather: bool) -> Self {
        self.gather_training = gather;
        self
    }

    /// Declares that the loaders already give each rank its own items, and must not be sliced. Not needed for
    /// [`DistributedLoader`](crate::DistributedLoader).
    pub fn dealt_already(mut self) -> Self {
        self.dealt = true;
        self
    }

    /// Seeds the device's random numbers before each epoch's training, from this seed, the rank and the epoch: the ranks
    /// then drop (`Dropout`) different activations, and a training that is resumed at an epoch continues as if it had not
    /// been interrupted. Default: random numbers continue from the program's state, which no checkpoint contains.
    ///
    /// Some of Burn's devices share their random numbers: if ranks are threads of one process, the ranks do not
    /// have their own.
    ///
    /// ```
    /// # use burn::tensor::Device;
    /// # use burn_ddp::{DdpStrategy, ProcessGroup};
    /// # let group = ProcessGroup::single();
    /// let strategy = DdpStrategy::new(&group, Device::flex()).seed(42);
    /// # let _ = strategy;
    /// ```
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Runs a training with this strategy. Ranks other than 0 open no dashboard and no log file; they would if
    /// the strategy were only passed to `SupervisedTraining::with_training_strategy`. What these ranks log as an error is
    /// printed to stderr, unless the program has installed a logger.
    pub fn launch<M>(
        self,
        training: SupervisedTraining<M>,
        learner: Learner<M>,
    ) -> LearningResult<M>
    where
        M: LearnerModel,
        <M as TrainStep>::Output: GatherOutput,
        <M as InferenceStep>::Output: GatherOutput,
    {
        let training = match self.group.is_main() {
            true => training,
            // This renderer gets no events, and so prints nothing.
            false => training
                .renderer(Box::new(CliMetricsRenderer::new()))
                .with_application_logger(Some(Box::new(ErrorsShown))),
        };
        let training = training.with_training_strategy(self.into());
        training.launch(learner)
    }

    /// The fault of the group that ended a training on this rank, if there was one.
    pub fn fault<M>(result: &LearningResult<M>) -> Option<&DdpError> {
        let error = result.error.as_deref()?;
        let mut next: Option<&(dyn Error + 'static)> = Some(error);
        while let Some(error) = next {
            if let Some(fault) = error.downcast_ref() {
                return Some(fault);
            }
            next = error.source();
        }
        None
    }

    /// Prepares the learner, and makes the model equal on all ranks.
    fn prepare<M: LearnerModel>(&self, learner: &mut Learner<M>) -> Result<Ddp, DdpError> {
        learner.fork(&self.device);
        let model = learner.model();
        let ddp = match &self.overlap {
            None => Ddp::new(&self.group, self.config.clone(), &model)?,
            Some(overlap) => Ddp::overlapped(&self.group, overlap.clone(), &model)?,
        };
        if self.group.world_size() > 1 {
            learner.load_model(ddp.receive(model, Part::All)?.into_record());
            if self.overlap.is_some() {
                learner.grad_sharded();
            }
        }
        Ok(ddp)
    }

    /// Records an error for the program, and ends the job on the other ranks if they do not know of it.
    fn report(&self, error: DdpError, interrupter: &Interrupter) {
        let known = error.is_fault() || matches!(error, DdpError::ModelMismatch { .. });
        if !known {
            self.group.abort(error.to_string());
        }
        // An error of this rank's own takes precedence over a fault that it caused.
        if interrupter.error().is_none() {
            interrupter.fail(TrainingError::Dataset(DatasetError::new(error)));
        }
    }
}

impl<M> From<DdpStrategy> for TrainingStrategy<M>
where
    M: LearnerModel,
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    fn from(strategy: DdpStrategy) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

impl<M> SupervisedLearningStrategy<M> for DdpStrategy
where
    M: LearnerModel,
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    /// Like burn-train's on rank 0; without events on the others.
    fn train(
        &self,
        learner: Learner<M>,
        dataloader_train: TrainLoader<M>,
        dataloader_valid: ValidLoader<M>,
        components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        if self.group.is_main() {
            return Main(self).train(learner, dataloader_train, dataloader_valid, components);
        }
        let starting_epoch = components.checkpoint.unwrap_or(0) + 1;
        let interrupter = components.interrupter.clone();
        let (model, events) = self.fit(
            components,
            learner,
            dataloader_train,
            dataloader_valid,
            starting_epoch,
        );
        LearningResult {
            model: model.valid(),
            renderer: events.renderer(),
            interrupted: interrupter.interruption(),
            error: interrupter.error(),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        dataloader_train: TrainLoader<M>,
        dataloader_valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        Fit::new(self, learner, components).run(dataloader_train, dataloader_valid, starting_epoch)
    }
}

/// The same, with burn-train's own events before and after.
struct Main<'a>(&'a DdpStrategy);

impl<M> SupervisedLearningStrategy<M> for Main<'_>
where
    M: LearnerModel,
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        dataloader_train: TrainLoader<M>,
        dataloader_valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let Self(strategy) = self;
        strategy.fit(
            components,
            learner,
            dataloader_train,
            dataloader_valid,
            starting_epoch,
        )
    }
}
