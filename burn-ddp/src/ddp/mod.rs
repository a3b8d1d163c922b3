//! Data parallel training: every rank has the same model, sees its share of the data, and applies
//! the average of all ranks' gradients.

mod bucketer;
mod parameters;
mod values;

use std::{
    collections::HashMap,
    fmt::{self, Debug},
    time::Duration,
};

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::Tensor,
};

use self::parameters::Signature;
pub use self::{
    bucketer::{BucketSizes, Bucketer, Compression, Slot},
    values::Values,
};
use crate::{DdpError, ProcessGroup};

/// Settings of [`Ddp`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct DdpConfig {
    bucket_bytes: usize,
    first_bucket_bytes: usize,
    compression: Option<Compression>,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl DdpConfig {
    /// Buckets of 25 MiB, the first of 1 MiB, no compression: PyTorch's defaults.
    pub fn new() -> Self {
        Self {
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            compression: None,
        }
    }

    /// The size of a bucket in bytes. A gradient larger than that has a bucket of its own.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// The size of the first bucket in bytes.
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = bytes;
        self
    }

    /// Sends `f32` gradients in a 16-bit type.
    pub fn compression(mut self, compression: Compression) -> Self {
        self.compression = Some(compression);
        self
    }
}

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
    bucketer: Bucketer,
    /// The trained parameters' signatures, last first: the order in which backward makes gradients.
    trained: Vec<Signature>,
    synchronize: bool,
    steps: u64,
}

impl Debug for Ddp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ddp")
            .field("group", &self.group)
            .field("parameters", &self.trained.len())
            .field("buckets", &self.bucketer.len())
            .finish_non_exhaustive()
    }
}

impl Ddp {
    /// Prepares for a model, after checking that all ranks' parameters have the same names, shapes
    /// and types, in the same order. Gradients travel on connections of their own.
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
        let signatures: Vec<Signature> = parameters::parameters(model)
            .into_iter()
            .map(|parameter| parameter.signature)
            .collect();
        check_equal(group, &signatures)?;
        let mut trained: Vec<Signature> = signatures;
        trained.retain(|signature| signature.trained);
        trained.reverse();
        let slots = trained
            .iter()
            .map(|signature| Slot {
                len: signature.shape.num_elements(),
                dtype: signature.dtype,
            })
            .collect();
        let sizes = BucketSizes {
            first: config.first_bucket_bytes,
            others: config.bucket_bytes,
        };
        Ok(Self {
            group: group.clone(),
            bucketer: Bucketer::new(group.duplicate()?, slots, sizes, config.compression),
            trained,
            synchronize: true,
            steps: 0,
        })
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
        // Running statistics keep their last update back until someone asks for the valid module.
        let _ = model.valid();
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
        let mut taker = Taker {
            slots: &slots,
            gradients,
            taken: ids.iter().map(|_| None).collect(),
        };
        model.visit(&mut taker);
        let Taker {
            gradients, taken, ..
        } = taker;
        for (slot, read) in taken.into_iter().enumerate() {
            let values = read.map(|read| read()).transpose()?;
            self.bucketer.submit(slot, values)?;
        }
        let averages = self.bucketer.finish()?;
        self.steps += 1;
        let mut giver = Giver {
            slots: &slots,
            trained: &self.trained,
            gradients,
            averages,
        };
        model.visit(&mut giver);
        Ok(giver.gradients)
    }

    /// Runs `body` without averaging: for all but the last of several accumulated micro-steps.
    pub fn no_sync<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let before = std::mem::replace(&mut self.synchronize, false);
        let result = body(self);
        self.synchronize = before;
        result
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
        DdpStats {
            steps: self.steps,
            buckets: self.bucketer.len(),
            bytes_reduced: self.steps * self.bucketer.bytes() as u64,
            waited: self.bucketer.waited(),
        }
    }
}

/// Compares the models of all ranks with that of rank 0.
fn check_equal(group: &ProcessGroup, ours: &[Signature]) -> Result<(), DdpError> {
    let invalid = |error: serde_json::Error| DdpError::Protocol {
        rank: 0,
        problem: format!("a model's description: {error}"),
    };
    let text = serde_json::to_vec(ours).map_err(invalid)?;
    let text = group.broadcast_bytes(&text, 0)?;
    let theirs: Vec<Signature> = serde_json::from_slice(&text).map_err(invalid)?;
    let problem = parameters::difference(&theirs, ours).unwrap_or_default();
    let problems = group.all_gather_bytes(problem.as_bytes())?;
    match problems.iter().position(|problem| !problem.is_empty()) {
        None => Ok(()),
        Some(rank) => Err(DdpError::ModelMismatch {
            rank,
            problem: String::from_utf8_lossy(&problems[rank]).into_owned(),
        }),
    }
}

/// Reads a gradient when asked to.
type Read = Box<dyn FnOnce() -> Result<Values, DdpError>>;

/// Takes the gradients out, in the visitors' order.
struct Taker<'a> {
    slots: &'a HashMap<ParamId, usize>,
    gradients: GradientsParams,
    taken: Vec<Option<Read>>,
}

impl ModuleVisitor for Taker<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.taken[*slot] = Some(Box::new(|| {
                let data = gradient.try_into_data();
                Values::from_data(data.map_err(|error| DdpError::Device(error.to_string()))?)
            }));
        }
    }
}

/// Puts the averages in.
struct Giver<'a> {
    slots: &'a HashMap<ParamId, usize>,
    trained: &'a [Signature],
    gradients: GradientsParams,
    averages: Vec<Option<Values>>,
}

impl ModuleVisitor for Giver<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        if let Some(average) = self.averages[*slot].take() {
            let Signature { shape, dtype, .. } = &self.trained[*slot];
            let device = param.base().device().without_autodiff();
            let data = average.into_data(shape.clone(), *dtype);
            let gradient = Tensor::<D>::from_data(data, (&device, *dtype));
            self.gradients.register(param.id, gradient);
        }
    }
}
