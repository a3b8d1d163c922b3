//! Gives all ranks what rank 0 has, and checks that they still have the same.

use std::sync::atomic::Ordering;

use burn::{module::Module, optim::ModuleOptimizer};

use super::{
    Ddp, Part,
    broadcast::{broadcast, on_device, optimizer, quantized},
    method::Method,
    overlap::mark,
    parameters, replicas,
    tied::tie,
};
use crate::DdpError;

impl Ddp {
    /// The model with the parameters and buffers (including running statistics) of rank 0. All ranks call this
    /// after [`new`](Self::new). If rank 0 has also loaded an optimizer's state, continue with
    /// [`broadcast_optimizer`](Self::broadcast_optimizer).
    ///
    /// Parameters then stay equal without being sent again if each rank computes the same step of the same averages: on devices
    /// of one kind, whose sums are deterministic, by the same kernels. Muon's products may be tuned to different kernels on
    /// different ranks; [`check_replicas`](Self::check_replicas) finds what drifts apart.
    ///
    /// Running statistics do not stay equal: each rank updates its own from its own batches, until this or
    /// [`broadcast_buffers`](Self::broadcast_buffers) is called. [`SyncBatchNorm`](crate::SyncBatchNorm) keeps them equal. So a new
    /// `Ddp` in the middle of training, as when layers are unfrozen, needs this again if the model has running statistics.
    /// Before you load a record into a model that has trained, call its `valid()`: Burn holds back the last update of running
    /// statistics until then, and would put it in the place of the loaded ones here.
    ///
    /// If a parameter (one [`ParamId`](burn::module::ParamId)) is in several places of the model with the same contents, these share
    /// one tensor afterwards. What fp8 layers keep of their last pass for the next (feature `fp8`) becomes the largest amax of all
    /// ranks.
    ///
    /// # Errors
    ///
    /// A fault of the group; [`DdpError::Aborted`], on all ranks, when a rank's model is not the one that this
    /// `Ddp` was made for, or cannot be read.
    #[must_use = "the model that it returns is the one to train"]
    pub fn broadcast_parameters<M: Module>(&self, model: M) -> Result<M, DdpError> {
        if self.group.world_size() == 1 {
            return Ok(model);
        }
        let model = self.receive(model, Part::All)?;
        Ok(match self.method {
            Method::After(_) => model,
            Method::During(_) => mark(model),
        })
    }

    /// The model with the buffers of rank 0, which differ between ranks where each updates its own, as running statistics of
    /// [`BatchNorm`](burn::nn::BatchNorm). All ranks call this: before an evaluation, or before each forward pass, as PyTorch's
    /// `broadcast_buffers` does. Trained parameters stay as they are.
    ///
    /// Burn tells buffers and frozen parameters by nothing but that they are not trained, so both are sent. Amaxes that fp8 layers
    /// keep of their last pass are buffers, too.
    ///
    /// ```
    /// # use burn::{module::Module, nn::BatchNormConfig, tensor::{Device, Distribution, Tensor}};
    /// # use burn_ddp::{Ddp, DdpConfig, ProcessGroup};
    /// # fn main() -> Result<(), burn_ddp::DdpError> {
    /// # let group = ProcessGroup::single();
    /// # let device = Device::flex().autodiff();
    /// # let model = BatchNormConfig::new(4).init(&device);
    /// # let batch = Tensor::<2>::random([8, 4], Distribution::Default, &device);
    /// let ddp = Ddp::new(&group, DdpConfig::new(), &model)?;
    /// let model = ddp.broadcast_parameters(model)?;
    /// model.forward(batch); // of this rank alone
    /// let model = ddp.broadcast_buffers(model)?;
    /// let evaluated = model.valid();
    /// # let _ = evaluated;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`broadcast_parameters`](Self::broadcast_parameters).
    #[must_use = "the model that it returns has the buffers"]
    pub fn broadcast_buffers<M: Module>(&self, model: M) -> Result<M, DdpError> {
        match self.group.world_size() {
            1 => Ok(model),
            _ => self.receive(model, Part::Untrained),
        }
    }

    /// The model with the tensors of rank 0, or a part of them. Does not mark parameters.
    pub(crate) fn receive<M: Module>(&self, model: M, part: Part) -> Result<M, DdpError> {
        // Running statistics only apply their last update when the valid module is requested.
        let _ = model.valid();
        let give_up = |error| self.group.give_up(error);
        parameters::check_fits(&model, &self.parameters).map_err(give_up)?;
        #[cfg(feature = "fp8")]
        let model = match part {
            Part::All => crate::fp8::share(&self.group, model).map_err(give_up)?,
            Part::Untrained => model,
        };
        let on_device = match &self.method {
            Method::After(after) => after.on_device(),
            Method::During(_) => None,
        };
        let received = match on_device {
            Some(group) => on_device::broadcast(group, model, &self.parameters, part),
            None => broadcast(&self.group, model, &self.parameters, part),
        };
        let received = received.and_then(|model| quantized::broadcast(&self.group, model));
        let received = received.map(tie).map_err(give_up)?;
        self.received.fetch_or(part == Part::All, Ordering::Relaxed);
        Ok(received)
    }

    /// The optimizer with the state of rank 0's optimizer, like Horovod's `broadcast_optimizer_state`. All ranks call this
    /// if only rank 0 has loaded a checkpoint: Burn stores an optimizer's state by parameter id, and each process draws its
    /// own ids. (If every rank loads the model's record, the ids come with it, and the optimizer's record loads as it is.)
    ///
    /// Burn 0.22 loads any optimizer's record onto `Device::default()`, in that device's default float dtype, and moves each
    /// parameter's state to the parameter's device when it is next stepped. So with several GPUs in a machine all ranks need memory on
    /// the first one for a while, unless each sees its own GPU alone (`CUDA_VISIBLE_DEVICES`); and parameters in another dtype
    /// than that default cannot go on from a record.
    ///
    /// ```
    /// # use burn::{module::Module, nn::LinearConfig, optim::AdamConfig, tensor::Device};
    /// # use burn_ddp::{Ddp, DdpConfig, ProcessGroup};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let group = ProcessGroup::single();
    /// # let folder = tempfile::tempdir()?;
    /// # let [model_file, optimizer_file] = ["model", "optimizer"].map(|name| folder.path().join(name));
    /// # let mut model = LinearConfig::new(4, 2).init(&Device::flex().autodiff());
    /// # let mut optimizer = AdamConfig::new().init();
    /// # model.clone().into_record().save(&model_file)?;
    /// # optimizer.save(&optimizer_file)?;
    /// let ddp = Ddp::new(&group, DdpConfig::new(), &model)?;
    /// if group.is_main() {
    ///     model = model.load_file(&model_file);
    ///     optimizer = optimizer.load(&optimizer_file)?;
    /// }
    /// let model = ddp.broadcast_parameters(model)?;
    /// let optimizer = ddp.broadcast_optimizer(optimizer, &model)?;
    /// # let _ = optimizer;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// A fault of the group; [`DdpError::Aborted`], on all ranks, when a rank's model is not the one that this
    /// `Ddp` was made for, or the state cannot be read.
    pub fn broadcast_optimizer<M: Module>(
        &self,
        optimizer: ModuleOptimizer,
        model: &M,
    ) -> Result<ModuleOptimizer, DdpError> {
        if self.group.world_size() == 1 {
            return Ok(optimizer);
        }
        parameters::check_fits(model, &self.parameters)
            .and_then(|()| optimizer::broadcast(&self.group, optimizer, model))
            .map_err(|error| self.group.give_up(error))
    }

    /// Checks that the trained parameters of all ranks are still equal. All ranks call this, now and then: each reads sums and up
    /// to eight elements of each parameter from its device, and the ranks exchange these.
    ///
    /// Replicas go apart if a rank changes its own (by a record that it alone loads, say), or if ranks compute different steps of
    /// the same gradients: devices whose sums are not deterministic, or optimizers whose kernels are tuned on each rank. As in the
    /// first step of [`reduce_gradients`](Self::reduce_gradients), a sum counts as different from a thousandth of the sum of
    /// magnitudes on, and an element from a thousandth of their mean. Buffers and frozen parameters, which
    /// [`broadcast_buffers`](Self::broadcast_buffers) makes equal, and quantized tensors are not compared.
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, tensor::Device};
    /// # use burn_ddp::{Ddp, DdpConfig, DdpError, ProcessGroup};
    /// # fn main() -> Result<(), DdpError> {
    /// # let group = ProcessGroup::single();
    /// # let model = LinearConfig::new(4, 2).init(&Device::flex().autodiff());
    /// let ddp = Ddp::new(&group, DdpConfig::new(), &model)?;
    /// let mut model = ddp.broadcast_parameters(model)?;
    /// // ... training steps ...
    /// if let Err(DdpError::ModelMismatch { rank, problem }) = ddp.check_replicas(&model) {
    ///     eprintln!("rank {rank}: {problem}"); // the same on all ranks
    ///     model = ddp.broadcast_parameters(model)?;
    /// }
    /// # let _ = model;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`DdpError::ModelMismatch`], on all ranks, with the first rank whose parameters differ from rank 0's and the first of these;
    /// the group can still be used. A fault of the group; [`DdpError::Aborted`], on all ranks, when a rank's model is not the one
    /// that this `Ddp` was made for, or cannot be read.
    pub fn check_replicas<M: Module>(&self, model: &M) -> Result<(), DdpError> {
        if self.group.world_size() == 1 {
            return Ok(());
        }
        parameters::check_fits(model, &self.parameters)
            .map_err(|error| self.group.give_up(error))?;
        replicas::check_trained(&self.group, model, &self.parameters)
    }
}
