//! Equal fp8 scales on all ranks.

use std::{
    error::Error,
    fmt::{self, Debug},
    sync::Arc,
};

use burn::{module::Module, tensor::Tensor};
use burn_fp8::{recipe::AmaxReducer, share_amaxes};

use crate::{DdpError, ProcessGroup, ReduceOp, TensorOp, group::WeakGroup};

/// Takes the maximum of amaxes over all ranks. For the fp8 layers of a model or device, [`ProcessGroup::amax_reducer`] makes a reducer
/// that does not keep the group.
///
/// Amaxes travel like other tensors ([`collective`](ProcessGroup::collective)): by NCCL they stay on their
/// device. NCCL may drop a NaN of one rank in favor of another rank's number, as in Transformer Engine, while
/// through the host a NaN wins. Either way all ranks get the same result. Delayed scaling ignores NaN, and with
/// current scaling a tensor that contains NaN keeps it whatever the scale.
///
/// **Checkpoints.** Layers share the amaxes of a training pass in the next one. Until then, the model of each rank has its own, and
/// a record written by rank 0 lacks the others'. To resume bit for bit, let all ranks call
/// [`share_amaxes`](burn_fp8::share_amaxes) before rank 0 saves: `model = share_amaxes(model, &group)?`.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_ddp::ProcessGroup;
/// use burn_fp8::recipe::AmaxReducer;
///
/// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?.duplicate()?
/// let amaxes = Tensor::<1>::from_data([1.0, 2.5, 0.5], &Device::flex());
/// let all = group.max(amaxes).unwrap();
/// assert_eq!(all.into_data().as_slice::<f32>().unwrap(), [1.0, 2.5, 0.5]);
/// ```
impl AmaxReducer for ProcessGroup {
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
        if self.world_size() == 1 {
            return Ok(amaxes);
        }
        Ok(self.collective(TensorOp::AllReduce(ReduceOp::Max), amaxes)?)
    }
}

/// Amaxes over the ranks of a group that the program may have dropped.
struct Amaxes(WeakGroup);

impl Debug for Amaxes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Amaxes").field(&self.0.upgrade()).finish()
    }
}

impl AmaxReducer for Amaxes {
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
        let group = self.0.upgrade();
        let group = group.ok_or("the process group of these amaxes has been dropped")?;
        group.max(amaxes)
    }
}

impl ProcessGroup {
    /// A reducer with a communicator of its own, for `Autocast::amax_reducer` of burn-amp and for fp8 layers. All ranks call this.
    ///
    /// It does not keep the group. A device with layers may live as long as the process, and a rank whose group does so too counts as
    /// dead when its process ends. Once the program has dropped its last handle of the group, the reducer fails.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_ddp::ProcessGroup;
    ///
    /// let group = ProcessGroup::init_or_single()?;
    /// let reducer = group.amax_reducer()?; // Autocast::fp8(DelayedScaling::new())?.amax_reducer(reducer)
    /// let amaxes = || Tensor::<1>::from_data([1.0, 2.5], &Device::flex());
    /// assert_eq!(reducer.max(amaxes())?.into_data().as_slice::<f32>()?, [1.0, 2.5]);
    /// drop(group);
    /// assert!(reducer.max(amaxes()).is_err());
    /// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`duplicate`](Self::duplicate).
    pub fn amax_reducer(&self) -> Result<Arc<dyn AmaxReducer>, DdpError> {
        let own = self.duplicate()?;
        let reducer = Arc::new(Amaxes(own.downgrade()));
        self.keep(own);
        Ok(reducer)
    }
}

/// The model with the same amaxes on all ranks, for the rank that gives its model to the others has seen only its own.
pub(crate) fn share<M: Module>(group: &ProcessGroup, model: M) -> Result<M, DdpError> {
    if model.devices().len() > 1 {
        return Ok(model);
    }
    share_amaxes(model, group).map_err(|error| match error.downcast::<DdpError>() {
        Ok(error) => *error,
        Err(error) => DdpError::Device(error.to_string()),
    })
}
