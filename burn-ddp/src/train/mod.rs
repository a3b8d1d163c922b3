//! burn-train's `Learner` over a process group.

mod checkpointer;
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

use self::fit::Fit;
pub use self::{
    checkpointer::{AtomicCheckpointer, EpochCheckpoints},
    gather::GatherOutput,
};
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
/// **Model.** Compared over the ranks at the start, and made equal to rank 0's. Between `TrainStep::step`
/// and `TrainStep::optimize`, gradients are averaged as by [`Ddp`], while backward still runs if there is
/// an [`overlap`](Self::overlap). Gradients that the `Learner` accumulates are added up without dividing,
/// as burn-train does, and averaged once. Buffers such as running statistics are those of rank 0 at each
/// validation and in each checkpoint.
///
/// **Data.** A [`DistributedLoader`](crate::DistributedLoader) gives each rank what its sampler deals out;
/// epoch `n` of the training, counted from 1, is the sampler's epoch `n - 1`, after a resume too. One whose
/// sampler is in the [middle](crate::DistributedLoader::load_state) of an epoch goes on there, in the training's
/// first epoch, which must be that one. Of any
/// other loader, each rank takes a slice of its own, as burn-train's own strategies do: a loader that is
/// only known as a `dyn DataLoader` can be sliced, but neither asked for its items nor given an order. Ranks
/// may have different numbers of batches; one without a batch counts as having gradients of zero (see
/// [`Ddp::join`]).
///
/// **Metrics.** burn-train's metrics are computed from the outputs of steps, in one place. So outputs travel to
/// rank 0 ([`GatherOutput`]), whose metrics see those of all ranks, one rank's batch after the other.
/// In validation each item counts once, whatever the samplers' padding; in training an item that is repeated
/// to even the ranks out is trained on twice, and counts twice. Metrics of the machine
/// (memory, temperature) are rank 0's. Where outputs are large,
/// [`gather_training(false)`](Self::gather_training) turns it off for training, and says what it costs.
///
/// **Rank 0** alone renders, logs, writes checkpoints and decides about early stopping; the others wait for its
/// checkpoints, and stop with it. A stop that is asked for on any rank (`Interrupter::stop`) stops all of them after
/// the same step. To resume (`SupervisedTraining::checkpoint`), all ranks must see the folder of the checkpoints.
/// burn-train writes them in place; with [`EpochCheckpoints`] (`SupervisedTraining::with_custom_checkpointers`),
/// an epoch's three files are there and belong together, or the epoch is not there. A model that draws random numbers
/// (`Dropout`) needs a [`seed`](Self::seed) to go on as if it had not stopped.
///
/// **Faults.** A rank that fails makes `launch` return on all others, with the fault in
/// `LearningResult::error`: see [`fault`](Self::fault). burn-train shows it as a dataset error, which is the only one
/// that can hold another.
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
    /// Trains on `device`, with gradients averaged after backward. The device decides about autodiff
    /// and gradient checkpointing (`SupervisedTraining::gradient_checkpointing` is for burn-train's own
    /// strategies); autodiff is added where it is missing.
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

    /// Settings of the averaging after backward. With an [`overlap`](Self::overlap), its own count.
    pub fn config(mut self, config: DdpConfig) -> Self {
        self.config = config;
        self
    }

    /// Averages gradients while backward still runs. The device must have the layer of `overlap`.
    pub fn overlap(mut self, overlap: Overlap) -> Self {
        self.overlap = Some(overlap);
        self
    }

    /// Whether the outputs of training steps travel to rank 0. Default: yes, so that the metrics of training are
    /// those of all items.
    ///
    /// That costs, in each step, a wait for the device on every rank, and a message of all that
    /// [`GatherOutput`] has (for a `ClassificationOutput`: the loss, the logits and the targets) from each to
    /// rank 0, which puts them on its device again and computes the metrics of all ranks. It is little for a
    /// classifier's logits, and much for logits of a vocabulary at every token. Turned off, the metrics of training
    /// are those of rank 0's share of the data, and no rank waits for its device to read outputs; validation gathers
    /// either way.
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

    /// Says that the loaders give each rank its own items already, and are not to be sliced. Needless
    /// for [`DistributedLoader`](crate::DistributedLoader).
    pub fn dealt_already(mut self) -> Self {
        self.dealt = true;
        self
    }

    /// Gives the device its random numbers before each epoch's training, of this seed, the rank and the epoch: the
    /// ranks drop out (`Dropout`) different activations, and a training that is resumed at an epoch goes on as if it
    /// had not been interrupted. Default: they go on from where the program has them, of which no checkpoint knows.
    ///
    /// Some of Burn's devices have their random numbers in common: where ranks are threads of a process, they are
    /// not each rank's own.
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

    /// Runs a training with this strategy. Other ranks than 0 open no dashboard and no log file, which they
    /// would if the strategy was only given to `SupervisedTraining::with_training_strategy`.
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
            // It is told nothing, and so says nothing.
            false => training
                .renderer(Box::new(CliMetricsRenderer::new()))
                .with_application_logger(None),
        };
        let training = training.with_training_strategy(self.into());
        training.launch(learner)
    }

    /// The fault of the group that ended a training on this rank, if one did.
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

    /// Makes the model equal on all ranks.
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

    /// Notes an error for the program, and ends the job on the other ranks if they do not know of it.
    fn report(&self, error: DdpError, interrupter: &Interrupter) {
        let known = error.is_fault() || matches!(error, DdpError::ModelMismatch { .. });
        if !known {
            self.group.abort(error.to_string());
        }
        // What this rank failed of comes before what that led to.
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
    /// As burn-train's on rank 0; without events on the others.
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

/// The same with burn-train's own events before and after.
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
