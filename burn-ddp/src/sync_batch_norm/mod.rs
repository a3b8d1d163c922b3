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
    tensor::{
        Bool, Tensor, assert_shape,
        module::{batch_norm, batch_norm_train},
    },
};
use burn_layer::device_under;

use self::{backends::SyncBatchNormOps, compute::wide};
pub use self::{
    convert::{Norm, ToSyncBatchNorm},
    remote::with_custom_ops,
};
use crate::ProcessGroup;

/// Burn's [`BatchNorm`] with statistics over the batches of all ranks: training works as if they were one
/// batch, as with PyTorch's `SyncBatchNorm`.
///
/// Ranks may have batches of different sizes, also of one sample or none, but they all must make the same
/// calls. If no rank has a sample, the running statistics stay unchanged. Statistics are computed and merged in
/// `f32` or wider, also for 16-bit inputs and in evaluation; the output has the input's type. Forward and
/// backward take one collective call each. The gradients of gamma and beta are this rank's share, like those of
/// all other parameters: [`Ddp`](crate::Ddp) averages them. In evaluation, when frozen, and in a group of one,
/// this is [`BatchNorm`], except that inputs and parameters may have different types.
///
/// Records are compatible with [`BatchNorm`] in both directions; they do not contain the group.
///
/// A fault of the group does not show in the forward or backward pass, which goes on with this rank's own
/// statistics. The group's next call returns it: in training, the one that averages the gradients.
///
/// A forward pass that trains keeps the group until a backward pass has run, as Burn's autodiff (0.22.1) keeps what a backward pass
/// may need. So where none follows, use the module's `valid()`: otherwise a rank's process may end without having left the group, which
/// the others take for a crash.
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
    /// The running variance, biased as in Burn.
    pub running_var: RunningState<Tensor<1>>,
    /// Momentum used to update the running statistics.
    pub momentum: f64,
    /// A value added to the variance for numerical stability.
    pub epsilon: f64,
    #[module(skip)]
    group: ProcessGroup,
}

impl SyncBatchNorm {
    /// Takes over the parameters, running statistics and settings of a [`BatchNorm`], and shares them with it.
    ///
    /// All normalization layers of a model may use the same group. If something else communicates at the same time
    /// (gradients during backward, or a layered device), give the layers their own [duplicate](ProcessGroup::duplicate).
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

    /// The same norm with statistics over the ranks of another group. A norm that was made by [`From`] needs
    /// this to be synchronized.
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
    /// Panics if the input has less than two dimensions or another number of channels, or if this crate was
    /// built without the device's backend (see the README).
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let [num_features] = self.gamma.shape().dims();
        assert_shape!(input, [_, num_features, ..]);
        match input.device().is_autodiff() && self.training.is_enabled() {
            false => self.forward_inference(input),
            true if self.group.world_size() == 1 && !is_empty(&input) => self.forward_alone(input),
            true => self.forward_synchronized(input),
        }
    }

    fn forward_inference<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let (device, dtype) = (input.device(), input.dtype());
        let input = input.cast(wide(dtype));
        let like_input = |tensor: Tensor<1>| tensor.to_device(&device).cast(wide(dtype));
        let output = batch_norm(
            input,
            like_input(self.gamma.val()),
            like_input(self.beta.val()),
            like_input(self.running_mean.value()),
            like_input(self.running_var.value()),
            self.epsilon,
        );
        output.cast(dtype)
    }

    fn forward_alone<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let dtype = input.dtype();
        let input = input.cast(wide(dtype));
        let [gamma, beta] = [&self.gamma, &self.beta].map(|it| it.val().cast(wide(dtype)));
        let result = batch_norm_train(input, gamma, beta, self.epsilon);
        self.update(result.mean, result.variance, None);
        result.output.cast(dtype)
    }

    fn forward_synchronized<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let empty = is_empty(&input);
        let (output, mean, variance) = <Dispatch as SyncBatchNormOps>::sync_batch_norm(
            input.into_dispatch(),
            self.gamma.val().into_dispatch(),
            self.beta.val().into_dispatch(),
            self.group.clone(),
            self.epsilon,
        );
        let [mean, variance] = [mean, variance].map(Tensor::from_dispatch);
        // If this rank has samples, no channel lacks them, so the device need not be asked.
        let nobody = empty.then(|| variance.clone().lower_elem(0.0));
        self.update(mean, variance, nobody);
        Tensor::from_dispatch(output)
    }

    /// Moves the running statistics towards those of a batch, except in channels in which `nobody` had samples.
    fn update(&self, mean: Tensor<1>, variance: Tensor<1>, nobody: Option<Tensor<1, Bool>>) {
        let layered = device_under(&mean.device()).is_some();
        let states = [(&self.running_mean, mean), (&self.running_var, variance)];
        let updates = states.map(|(state, value)| {
            let old = state.value_sync().to_device(&value.device());
            let value = value.detach().cast(old.dtype());
            let moved = old.clone().mul_scalar(1.0 - self.momentum);
            let moved = moved + value.mul_scalar(self.momentum);
            let new = match &nobody {
                None => moved,
                Some(nobody) => moved.mask_where(nobody.clone(), old),
            };
            (state, new.detach())
        });
        for (state, new) in updates {
            // A layered device does so itself, at a better time.
            let new = match layered {
                true => new,
                false => alone_in_kernel(new),
            };
            state.update(new);
        }
    }
}

/// Ends the kernel that running statistics are computed in, by a view. Nothing uses them before the next step, so a backend that
/// fuses ops would keep the kernel open until then, and compute the ops of the next norm, up to where ranks exchange its
/// statistics, one by one.
fn alone_in_kernel(tensor: Tensor<1>) -> Tensor<1> {
    let channels = tensor.dims();
    tensor.unsqueeze::<2>().reshape(channels)
}

fn is_empty<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.shape().num_elements() == 0
}

/// The norm in a group of its own, where it works like [`BatchNorm`]. [`SyncBatchNorm::with_group`] sets another group.
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
