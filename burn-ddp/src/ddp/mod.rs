//! Data parallel training: every rank has the same model, sees its share of the data, and applies
//! the average of all ranks' gradients.

mod after;
mod agreement;
mod averager;
mod bucketer;
mod config;
mod gradient;
mod hook;
mod join;
mod on_device;
mod overlap;
mod parameters;
mod reducer;
mod take;
mod timeline;
mod values;

use std::{
    collections::HashMap,
    fmt::{self, Debug},
    time::Duration,
};

use burn::{
    module::{Module, ParamId},
    optim::GradientsParams,
    tensor::{
        Device,
        distributed::{DistributedConfig, DistributedContext, ReduceOperation},
    },
};
use burn_layer::device_under;

use self::{
    after::{average, bucketer},
    agreement::{check_equal, check_present, present},
    on_device::OnDevice,
    parameters::Signature,
};
pub use self::{
    bucketer::{BucketSizes, Bucketer, Slot},
    config::DdpConfig,
    hook::{Average, CommHook, Compression, GradientBucket},
    overlap::{Overlap, OverlapLayer},
    timeline::{BucketTimes, Timeline},
    values::Values,
};
use crate::{DdpError, ProcessGroup};

/// What a rank says that breaks its promise.
const NOT_STATIC: &str =
    "it has other gradients than in its first step, though a static graph was promised";

/// What the averaging of gradients has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DdpStats {
    /// Calls of [`Ddp::reduce_gradients`] that communicated.
    pub steps: u64,
    /// Buckets of one step.
    pub buckets: usize,
    /// Bytes given to all-reduces.
    pub bytes_reduced: u64,
    /// Time spent waiting for averages after the last gradient was handed over.
    pub waited: Duration,
}

/// Keeps the replicas of a model equal over the ranks of a group.
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
    /// The trained parameters' signatures, last first: the order in which backward makes gradients.
    trained: Vec<Signature>,
    synchronize: bool,
    divide_by_initial_world_size: bool,
    /// The number of ranks that have a batch for this step.
    active: usize,
    steps: u64,
}

/// When gradients are averaged.
enum Method {
    /// After backward, on the host.
    After(Bucketer),
    /// After backward, on the device.
    OnDevice(OnDevice),
    /// During backward.
    During {
        overlap: Overlap,
        /// For gradients that were accumulated without averaging.
        bucketer: Bucketer,
        device: Device,
        /// While this lives, backward submits gradients.
        context: Option<DistributedContext>,
        /// The gradients of a static graph, once all ranks were found to have the same.
        fixed: Option<Vec<u8>>,
    },
}

impl Debug for Ddp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ddp")
            .field("group", &self.group)
            .field("parameters", &self.trained.len())
            .field("overlapped", &matches!(self.method, Method::During { .. }))
            .finish_non_exhaustive()
    }
}

impl Ddp {
    /// Prepares for a model, after checking that all ranks' parameters have the same names, shapes
    /// and types, in the same order. Gradients travel on connections of their own; where the group uses
    /// NCCL, they stay on their device.
    ///
    /// # Errors
    ///
    /// [`DdpError::ModelMismatch`], on every rank, with the first parameter that differs; or a fault of
    /// the group.
    pub fn new<M: Module>(
        group: &ProcessGroup,
        config: DdpConfig,
        model: &M,
    ) -> Result<Self, DdpError> {
        let trained = check_equal(group, model)?;
        let own = group.duplicate()?;
        let method = match OnDevice::new(&own, &config, &trained, model)? {
            Some(on_device) => Method::OnDevice(on_device),
            None => Method::After(bucketer(own, &trained, &config)),
        };
        Ok(Self {
            group: group.clone(),
            method,
            trained,
            synchronize: true,
            divide_by_initial_world_size: config.divide_by_initial_world_size,
            active: group.world_size(),
            steps: 0,
        })
    }

    /// The same for a model on a layered device with the layer of `overlap`: gradients are averaged
    /// while backward still runs. The model must then pass through
    /// [`broadcast_parameters`](Self::broadcast_parameters), which marks its parameters.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and [`DdpError::InvalidArgument`] when the model's device is not an
    /// autodiff device with layers.
    pub fn overlapped<M: Module>(
        group: &ProcessGroup,
        overlap: Overlap,
        model: &M,
    ) -> Result<Self, DdpError> {
        let devices = model.devices();
        let [device] = &devices[..] else {
            return Err(DdpError::InvalidArgument(format!(
                "the model is on {} devices; expected one",
                devices.len()
            )));
        };
        let device = device.clone().autodiff();
        if !overlap::is_layered(&device) {
            return Err(DdpError::InvalidArgument(format!(
                "the model's device, {device:?}, has no layers; serve it with `Overlap::layer`"
            )));
        }
        let trained = check_equal(group, model)?;
        // Here, where all ranks are: the ops of backward come in an order of each rank's own.
        if let Some(under) = device_under(&device) {
            overlap.group().tensor_backend(&under)?;
        }
        let bucketer = bucketer(overlap.group().clone(), &trained, overlap.config());
        let divide_by_initial_world_size = overlap.config().divide_by_initial_world_size;
        let mut ddp = Self {
            group: group.clone(),
            method: Method::During {
                overlap,
                bucketer,
                device,
                context: None,
                fixed: None,
            },
            trained,
            synchronize: true,
            divide_by_initial_world_size,
            active: group.world_size(),
            steps: 0,
        };
        ddp.set_synchronize(true);
        Ok(ddp)
    }

    /// The model with the parameters and buffers (running statistics too) of rank 0.
    ///
    /// # Errors
    ///
    /// A fault of the group, or [`DdpError::Device`].
    pub fn broadcast_parameters<M: Module>(&self, model: M) -> Result<M, DdpError> {
        if self.group.world_size() == 1 {
            return Ok(model);
        }
        let model = self.receive(model)?;
        Ok(match self.method {
            Method::After(_) | Method::OnDevice(_) => model,
            Method::During { .. } => overlap::mark(model),
        })
    }

    /// The model with the contents of rank 0's, its parameters not marked.
    pub(crate) fn receive<M: Module>(&self, model: M) -> Result<M, DdpError> {
        // Running statistics keep their last update back until someone asks for the valid module.
        let _ = model.valid();
        if let Method::OnDevice(on_device) = &self.method {
            return on_device.broadcast(model);
        }
        let ours = match self.group.is_main() {
            true => parameters::contents(&model)?,
            false => Vec::new(),
        };
        let bytes = self.group.broadcast_bytes(&ours, 0)?;
        match self.group.is_main() {
            true => Ok(model),
            false => Ok(parameters::with_contents(model, &bytes)),
        }
    }

    /// The averages of all ranks' gradients, to be called by all ranks in each step.
    ///
    /// A rank that lacks a gradient that others have counts as having zeros, and gets the average;
    /// a gradient that no rank has stays absent. Inside [`no_sync`](Self::no_sync), the gradients come
    /// back as they are.
    ///
    /// # Errors
    ///
    /// A fault of the group; [`DdpError::InvalidArgument`] when the model is not the one that this was
    /// made for.
    pub fn reduce_gradients<M: Module>(
        &mut self,
        gradients: GradientsParams,
        model: &M,
    ) -> Result<GradientsParams, DdpError> {
        if self.group.world_size() == 1 || !self.synchronize {
            return Ok(gradients);
        }
        let mut parameters = parameters::parameters(model);
        parameters.retain(|parameter| parameter.signature.trained);
        parameters.reverse();
        let same = parameters.len() == self.trained.len()
            && parameters.iter().map(|it| &it.signature).eq(&self.trained);
        if !same {
            return Err(DdpError::InvalidArgument(
                "the model's trained parameters have changed; make a new Ddp for it".into(),
            ));
        }
        let ids: Vec<ParamId> = parameters.iter().map(|it| it.id).collect();
        let slots: HashMap<ParamId, usize> = ids.iter().copied().zip(0..).collect();
        let factor = match self.divide_by_initial_world_size {
            true => 1.0,
            false => self.group.world_size() as f64 / self.active as f64,
        };
        let trained = &self.trained;
        let gradients = match &mut self.method {
            Method::After(bucketer) => {
                average(bucketer, trained, &slots, gradients, model, factor)?
            }
            Method::OnDevice(on_device) => {
                on_device.average(trained, &slots, gradients, model, factor)?
            }
            Method::During {
                overlap,
                bucketer,
                device,
                fixed,
                ..
            } => {
                let averaged = overlap.finish(device)?;
                if averaged == 0 {
                    // They were made inside `no_sync`, or some ranks have no batch.
                    average(bucketer, trained, &slots, gradients, model, factor)?
                } else {
                    let present = present(&slots, &gradients, model);
                    match fixed {
                        Some(known) if *known == present => {}
                        Some(_) => return Err(self.group.abort(NOT_STATIC)),
                        None => {
                            check_present(&self.group, &parameters, &present)?;
                            *fixed = overlap.config().static_graph.then_some(present);
                        }
                    }
                    if averaged != gradients.len() {
                        return Err(DdpError::InvalidArgument(format!(
                            "{averaged} of {} gradients were averaged during backward; pass the \
                             model through broadcast_parameters when parameters were loaded, and \
                             run backward inside no_sync when gradients are accumulated",
                            gradients.len()
                        )));
                    }
                    gradients
                }
            }
        };
        self.steps += 1;
        Ok(gradients)
    }

    /// Runs `body` without averaging. To accumulate gradients over several micro-steps, run the
    /// backward passes of all of them in here, and then give the sum to
    /// [`reduce_gradients`](Self::reduce_gradients), which averages it over the ranks.
    pub fn no_sync<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let before = self.synchronize;
        self.set_synchronize(false);
        let result = body(self);
        self.set_synchronize(before);
        result
    }

    fn set_synchronize(&mut self, synchronize: bool) {
        self.synchronize = synchronize;
        let alone = self.group.world_size() == 1;
        let all_active = self.active == self.group.world_size();
        if let Method::During {
            device, context, ..
        } = &mut self.method
        {
            if !synchronize || alone || !all_active {
                *context = None;
            } else if context.is_none() {
                let config = DistributedConfig {
                    all_reduce_op: ReduceOperation::Mean,
                };
                *context = Some(DistributedContext::init(vec![device.clone()], config));
            }
        }
    }

    /// Whether any rank says so: whether a loss scaler found an overflow, for instance, so that all
    /// skip the step together.
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

    /// What the averaging has cost so far.
    pub fn stats(&self) -> DdpStats {
        match &self.method {
            Method::After(bucketer) => DdpStats {
                steps: self.steps,
                buckets: bucketer.len(),
                bytes_reduced: bucketer.bytes_reduced(),
                waited: bucketer.waited(),
            },
            Method::OnDevice(on_device) => DdpStats {
                steps: self.steps,
                buckets: on_device.buckets(),
                bytes_reduced: on_device.bytes_reduced(),
                waited: on_device.waited(),
            },
            Method::During { overlap, .. } => DdpStats {
                steps: self.steps,
                buckets: overlap.timeline().buckets.len(),
                bytes_reduced: overlap.bytes_reduced(),
                waited: overlap.waited(),
            },
        }
    }

    /// When the last backward pass sent its buckets and when their averages were there, if gradients
    /// are averaged during backward.
    pub fn timeline(&self) -> Option<Timeline> {
        match &self.method {
            Method::After(_) | Method::OnDevice(_) => None,
            Method::During { overlap, .. } => Some(overlap.timeline()),
        }
    }
}
