//! Data parallel training: every rank has the same model, sees its share of the data, and applies
//! the average of all ranks' gradients.

mod after;
mod agreement;
mod averager;
mod broadcast;
mod config;
mod during;
mod equal;
mod gradient;
mod hook;
mod join;
mod method;
mod number;
mod overlap;
mod parameters;
mod presence;
mod reducer;
mod replicas;
mod server;
mod step;
mod tied;
mod timeline;
mod values;

use std::{
    fmt::{self, Debug},
    sync::atomic::AtomicBool,
    time::Duration,
};

use burn::{module::Module, optim::GradientsParams};

pub(crate) use self::broadcast::Part;
pub(crate) use self::config::{BUCKET, FIRST_BUCKET};
use self::{
    after::After,
    agreement::{check_equal, on_all_ranks},
    during::During,
    hook::is_plain,
    method::Method,
    parameters::Signature,
    step::Step,
};
pub use self::{
    config::DdpConfig,
    hook::{Average, CommHook, Compression, GradientBucket},
    overlap::{Overlap, OverlapLayer},
    timeline::{BucketTimes, Timeline},
    values::Values,
};
use crate::{DdpError, ProcessGroup};

/// The cost of averaging gradients so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DdpStats {
    /// Calls of [`Ddp::reduce_gradients`] that communicated.
    pub steps: u64,
    /// The number of buckets in the last step.
    pub buckets: usize,
    /// Bytes passed to all-reduces.
    pub bytes_reduced: u64,
    /// Time spent waiting for averages after the last gradient was submitted.
    pub waited: Duration,
}

/// Keeps the replicas of a model equal on all ranks of a group: they begin alike, and all ranks get the same averages of
/// gradients. Their steps are then the same where their devices compute the same (see
/// [`broadcast_parameters`](Self::broadcast_parameters)).
///
/// ```
/// use burn::{
///     module::Module,
///     nn::LinearConfig,
///     optim::{GradientsParams, SgdConfig},
///     tensor::{Device, Distribution, Tensor},
/// };
/// use burn_ddp::{Ddp, DdpConfig, ProcessGroup};
///
/// # fn main() -> Result<(), burn_ddp::DdpError> {
/// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(4, 2).init(&device);
///
/// let mut ddp = Ddp::new(&group, DdpConfig::new(), &model)?;
/// let mut model = ddp.broadcast_parameters(model)?;
/// let mut optimizer = SgdConfig::new().init();
/// for _ in 0..3 {
///     let batch = Tensor::<2>::random([8, 4], Distribution::Default, &device);
///     let loss = model.forward(batch).powi_scalar(2).mean();
///     let gradients = GradientsParams::from_grads(loss.backward(), &model);
///     let gradients = ddp.reduce_gradients(gradients, &model)?;
///     model = optimizer.step(0.1, model, gradients);
/// }
/// # Ok(())
/// # }
/// ```
pub struct Ddp {
    group: ProcessGroup,
    method: Method,
    /// The signatures of all parameters.
    parameters: Vec<Signature>,
    /// The signatures of the trained parameters, last first: the order in which backward computes gradients.
    trained: Vec<Signature>,
    /// The digests of the tensors that are not trained, as this `Ddp` was made.
    untrained: Vec<Vec<f32>>,
    /// Whether there is nothing to average: one rank, without a hook that computes more than averages.
    alone: bool,
    synchronize: bool,
    divide_by_initial_world_size: bool,
    /// The number of ranks that have a batch for this step.
    active: usize,
    /// Whether the ranks have received the tensors of rank 0.
    received: AtomicBool,
    /// Whether the ranks' models have been compared in the first step.
    compared: bool,
    steps: u64,
}

impl Debug for Ddp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ddp")
            .field("group", &self.group)
            .field("parameters", &self.trained.len())
            .field("overlapped", &matches!(self.method, Method::During(_)))
            .finish_non_exhaustive()
    }
}

impl Ddp {
    /// Prepares to train a model. Checks that the parameters of all ranks have the same names, shapes and
    /// types, in the same order. Gradients have their own connections. If the group uses NCCL, they stay on
    /// their device. (The gradients of a layered device go through the host; see [`Overlap`].)
    ///
    /// # Errors
    ///
    /// [`DdpError::ModelMismatch`], on every rank, with the first parameter that differs; or a fault of the group.
    pub fn new<M: Module>(
        group: &ProcessGroup,
        config: DdpConfig,
        model: &M,
    ) -> Result<Self, DdpError> {
        Self::by(group, model, &config, |trained| {
            let after = After::new(group.duplicate()?, config.clone(), trained, model)?;
            Ok(Method::After(after))
        })
    }

    /// The same for a model on a layered device with the layer of `overlap`: gradients are averaged while
    /// backward still runs. The model must then pass through
    /// [`broadcast_parameters`](Self::broadcast_parameters), which marks its parameters.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new). [`DdpError::InvalidArgument`], on all ranks, when a rank's model is not on
    /// a single device with layers, or its process already has an overlapped `Ddp` of several ranks. Burn has
    /// one gradient server per process, so ranks that are threads of one process must use [`new`](Self::new).
    pub fn overlapped<M: Module>(
        group: &ProcessGroup,
        overlap: Overlap,
        model: &M,
    ) -> Result<Self, DdpError> {
        let reducer = overlap.reducer.clone();
        let mut ddp = Self::by(group, model, reducer.config(), |trained| {
            let device = on_all_ranks(group, During::device(model))?;
            reducer.decide_place(trained);
            Ok(Method::During(During::new(group, overlap, device)?))
        })?;
        ddp.set_synchronize(true);
        Ok(ddp)
    }

    /// Compares the models of all ranks, and then makes the method from the signatures of the trained parameters.
    fn by<M: Module>(
        group: &ProcessGroup,
        model: &M,
        config: &DdpConfig,
        method: impl FnOnce(&[Signature]) -> Result<Method, DdpError>,
    ) -> Result<Self, DdpError> {
        let parameters = check_equal(group, model)?;
        let trained = parameters.iter().rev().filter(|it| it.trained);
        let trained: Vec<Signature> = trained.cloned().collect();
        let untrained = replicas::untrained(group, model, &parameters)?;
        Ok(Self {
            group: group.clone(),
            method: method(&trained)?,
            alone: group.world_size() == 1 && is_plain(&*config.hook, &trained),
            parameters,
            trained,
            untrained,
            synchronize: true,
            divide_by_initial_world_size: config.divide_by_initial_world_size,
            active: group.world_size(),
            received: AtomicBool::new(false),
            compared: false,
            steps: 0,
        })
    }

    /// Averages the gradients of all ranks. Every rank calls this in each step.
    ///
    /// If only some ranks have a gradient, the others count as having zeros and get the average too. A gradient
    /// that no rank has stays absent. Inside [`no_sync`](Self::no_sync), gradients are returned unchanged.
    ///
    /// # Errors
    ///
    /// A fault of the group; [`DdpError::Aborted`], on all ranks, when a rank's model is not the one that this
    /// `Ddp` was made for, or its gradients cannot be read. In the first step, [`DdpError::ModelMismatch`], on all ranks,
    /// when the sums of trained parameters, or samples of their elements, show that their initial values differ from rank
    /// 0's: also after [`broadcast_parameters`](Self::broadcast_parameters), if a rank trains another model than this has
    /// returned. Without it, the same holds for frozen parameters and buffers (including running statistics), which count as
    /// they were when this `Ddp` was made, before forward passes. Quantized tensors are not compared.
    pub fn reduce_gradients<M: Module>(
        &mut self,
        gradients: GradientsParams,
        model: &M,
    ) -> Result<GradientsParams, DdpError> {
        if self.alone || !self.synchronize {
            return Ok(gradients);
        }
        let give_up = |error| self.group.give_up(error);
        let step = Step::new(model, &self.trained, self.factor()).map_err(give_up)?;
        let received = *self.received.get_mut();
        let compares = !self.compared && self.group.world_size() > 1;
        let compare = || {
            let (parameters, untrained) = (&self.parameters, &self.untrained);
            replicas::check_start(&self.group, model, parameters, untrained, received)
        };
        if compares && !received {
            compare()?;
        }
        let averages = self.method.average(&step, gradients);
        // If one rank fails, the others must not wait for it.
        let gradients = averages.map_err(give_up)?;
        // Models that were equal are probably the ones that are trained: what fails before says more.
        if compares && received {
            compare()?;
        }
        self.compared = true;
        self.steps += 1;
        Ok(gradients)
    }

    /// Runs `body` without averaging. To accumulate gradients over several micro-steps, run all their backward
    /// passes in here, and then pass the sum to [`reduce_gradients`](Self::reduce_gradients), which averages it
    /// over the ranks. All ranks must do so in the same steps.
    ///
    /// PyTorch's way, with the last backward pass outside, gives the same result. (With an [`Overlap`] it hides
    /// no more communication, because the sum is averaged after backward.)
    pub fn no_sync<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        /// Turns averaging on again, also if the body panics and the program goes on.
        struct Guard<'a>(&'a mut Ddp, bool);

        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                self.0.set_synchronize(self.1);
            }
        }

        let before = self.synchronize;
        self.set_synchronize(false);
        body(Guard(self, before).0)
    }

    fn set_synchronize(&mut self, synchronize: bool) {
        self.synchronize = synchronize;
        if let Method::During(during) = &mut self.method {
            during.want(synchronize, self.active == self.group.world_size());
        }
    }

    /// Whether `value` is `true` on any rank: for example, whether a loss scaler found an overflow, so that all
    /// ranks skip the step together.
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn all_reduce_any(&self, value: bool) -> Result<bool, DdpError> {
        self.group.all_reduce_any(value)
    }

    /// The group.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The cost of averaging gradients so far.
    pub fn stats(&self) -> DdpStats {
        DdpStats {
            steps: self.steps,
            ..self.method.stats()
        }
    }

    /// When the last backward pass sent its buckets and when their averages arrived, if gradients are averaged
    /// during backward.
    pub fn timeline(&self) -> Option<Timeline> {
        self.method.timeline()
    }
}
