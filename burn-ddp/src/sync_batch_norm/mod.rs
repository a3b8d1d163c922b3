//! Batch normalization over the batches of all ranks.

mod autodiff;
mod backends;
mod compute;
mod convert;
mod exchange;
mod remote;
mod statistics;

use burn::{
    backend::Dispatch,
    module::{Content, DisplaySettings, Flag, Module, ModuleDisplay, Param, RunningState},
    nn::BatchNorm,
    tensor::{Tensor, assert_shape, module::batch_norm},
};

use self::backends::SyncBatchNormOps;
pub use self::{
    convert::{Norm, ToSyncBatchNorm},
    remote::with_custom_ops,
};
use crate::ProcessGroup;

/// Burn's [`BatchNorm`] with the statistics of the batches of all ranks, in training as if they
/// were one batch (as PyTorch's `SyncBatchNorm`).
///
/// Ranks may have batches of different size, one sample, or none; they all make the same calls.
/// Statistics are kept and merged in `f32` or wider, also for 16-bit inputs. Each direction takes one
/// collective call. The gradients of gamma and beta are this rank's share, as those of all other
/// parameters: [`Ddp`](crate::Ddp) averages them. For evaluation, when frozen, and in a group of one,
/// it is [`BatchNorm`].
///
/// Its records are those of [`BatchNorm`], both ways; the group is no part of them.
///
/// A fault of the group does not surface here, in the middle of a forward or backward pass (it
/// goes on with this rank's own statistics), but from the group's next call, which in training is the
/// one that averages the gradients.
///
/// ```
/// use burn::{
///     nn::BatchNormConfig,
///     tensor::{Device, Distribution, Tensor},
/// };
/// use burn_ddp::{ProcessGroup, SyncBatchNorm};
///
/// let device = Device::flex().autodiff();
/// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?.duplicate()?
/// let norm = SyncBatchNorm::new(&BatchNormConfig::new(3).init(&device), &group);
/// let images = Tensor::<4>::random([2, 3, 8, 8], Distribution::Default, &device);
/// assert_eq!(norm.forward(images).dims(), [2, 3, 8, 8]);
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct SyncBatchNorm {
    /// The learnable weight gamma.
    pub gamma: Param<Tensor<1>>,
    /// The learnable bias beta.
    pub beta: Param<Tensor<1>>,
    /// Whether training behavior is enabled for this layer.
    pub training: Param<Flag>,
    /// The running mean.
    pub running_mean: RunningState<Tensor<1>>,
    /// The running variance, biased as Burn's.
    pub running_var: RunningState<Tensor<1>>,
    /// Momentum used to update the running statistics.
    pub momentum: f64,
    /// A value added to the variance for numerical stability.
    pub epsilon: f64,
    #[module(skip)]
    group: ProcessGroup,
}

impl SyncBatchNorm {
    /// Shares the parameters, running statistics and settings of a [`BatchNorm`].
    ///
    /// All normalization layers of a model may use one group. When something else communicates at the
    /// same time (gradients during backward, a layered device), give them a
    /// [duplicate](ProcessGroup::duplicate) of their own.
    pub fn new(norm: &BatchNorm, group: &ProcessGroup) -> Self {
        let BatchNorm {
            gamma,
            beta,
            training,
            running_mean,
            running_var,
            momentum,
            epsilon,
        } = norm.clone();
        Self {
            gamma,
            beta,
            training,
            running_mean,
            running_var,
            momentum,
            epsilon,
            group: group.clone(),
        }
    }

    /// The same norm with the statistics of another group's ranks: what a norm made by [`From`] needs to be
    /// synchronized.
    ///
    /// ```
    /// use burn::{nn::BatchNormConfig, tensor::Device};
    /// use burn_ddp::{ProcessGroup, SyncBatchNorm};
    ///
    /// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?.duplicate()?
    /// let norm = SyncBatchNorm::from(BatchNormConfig::new(3).init(&Device::flex()));
    /// let norm = norm.with_group(&group);
    /// # let _ = norm;
    /// ```
    #[must_use]
    pub fn with_group(mut self, group: &ProcessGroup) -> Self {
        self.group = group.clone();
        self
    }

    /// Normalizes the input, of shape `[batch, channels, ...]`; the output has the same shape.
    ///
    /// # Panics
    ///
    /// Panics if the input has less than two dimensions or another number of channels, or if the
    /// device's backend is none of those that this crate was built with (see the README).
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let [num_features] = self.gamma.shape().dims();
        assert_shape!(input, [_, num_features, ..]);
        match input.device().is_autodiff() && self.training.is_enabled() {
            false => self.forward_inference(input),
            true if self.group.world_size() == 1 && input.dims()[0] > 0 => {
                self.forward_alone(input)
            }
            true => self.forward_synchronized(input),
        }
    }

    fn forward_inference<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let device = input.device();
        batch_norm(
            input,
            self.gamma.val(),
            self.beta.val(),
            self.running_mean.value().to_device(&device),
            self.running_var.value().to_device(&device),
            self.epsilon,
        )
    }

    fn forward_alone<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let (gamma, beta) = (self.gamma.val(), self.beta.val());
        let result = burn::tensor::module::batch_norm_train(input, gamma, beta, self.epsilon);
        self.update(result.mean, result.variance);
        result.output
    }

    fn forward_synchronized<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let (output, mean, variance) = <Dispatch as SyncBatchNormOps>::sync_batch_norm(
            input.into_dispatch(),
            self.gamma.val().into_dispatch(),
            self.beta.val().into_dispatch(),
            self.group.id(),
            self.epsilon,
        );
        self.update(Tensor::from_dispatch(mean), Tensor::from_dispatch(variance));
        Tensor::from_dispatch(output)
    }

    /// Moves the running statistics towards those of a batch.
    fn update(&self, mean: Tensor<1>, variance: Tensor<1>) {
        for (state, value) in [(&self.running_mean, mean), (&self.running_var, variance)] {
            let old = state.value_sync().to_device(&value.device());
            let value = value.detach().cast(old.dtype());
            let new = old.mul_scalar(1.0 - self.momentum) + value.mul_scalar(self.momentum);
            state.update(new.detach());
        }
    }
}

/// The norm in a group of its own, in which it is a [`BatchNorm`]; [`SyncBatchNorm::with_group`] gives it
/// another.
impl From<BatchNorm> for SyncBatchNorm {
    fn from(norm: BatchNorm) -> Self {
        Self::new(&norm, &ProcessGroup::single())
    }
}

impl From<SyncBatchNorm> for BatchNorm {
    fn from(norm: SyncBatchNorm) -> Self {
        Self {
            gamma: norm.gamma,
            beta: norm.beta,
            training: norm.training,
            running_mean: norm.running_mean,
            running_var: norm.running_var,
            momentum: norm.momentum,
            epsilon: norm.epsilon,
        }
    }
}

impl ModuleDisplay for SyncBatchNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [num_features] = self.beta.shape().dims();
        content
            .add("num_features", &num_features)
            .add("momentum", &self.momentum)
            .add("epsilon", &self.epsilon)
            .add("ranks", &self.group.world_size())
            .optional()
    }
}
