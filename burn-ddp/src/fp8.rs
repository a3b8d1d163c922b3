//! Equal fp8 scales on all ranks.

use std::error::Error;

use burn::tensor::Tensor;
use burn_fp8::recipe::AmaxReducer;

use crate::{ProcessGroup, ReduceOp, TensorOp};

/// Takes the maximum of amaxes over all ranks: give a [duplicate](ProcessGroup::duplicate) of the group to the
/// fp8 layers of a model.
///
/// Amaxes travel like other tensors ([`collective`](ProcessGroup::collective)): by NCCL they stay on their
/// device. NCCL may drop a NaN of one rank in favor of another rank's number, as in Transformer Engine, while
/// through the host a NaN wins. Either way all ranks get the same result. Delayed scaling ignores NaN, and with
/// current scaling a tensor that contains NaN keeps it whatever the scale.
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
