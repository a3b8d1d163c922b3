//! Equal fp8 scales on all ranks.

use std::error::Error;

use burn::{module::Module, tensor::Tensor};
use burn_fp8::{recipe::AmaxReducer, share_amaxes};

use crate::{DdpError, ProcessGroup, ReduceOp, TensorOp};

/// Takes the maximum of amaxes over all ranks: give a [duplicate](ProcessGroup::duplicate) of the group to the
/// fp8 layers of a model.
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
