//! Scales of fp8 layers, the same on all ranks.

use std::error::Error;

use burn::tensor::Tensor;
use burn_fp8::recipe::AmaxReducer;

use crate::{ProcessGroup, ReduceOp, TensorOp};

/// The largest amaxes over the ranks: give a [duplicate](ProcessGroup::duplicate) of the group to the fp8
/// layers of a model.
///
/// Amaxes travel as tensors do ([`collective`](ProcessGroup::collective)): by NCCL they stay on their device. There a NaN
/// of one rank may lose to a number of another, as in Transformer Engine, while through the host it wins. Either way
/// all ranks get the same; delayed scaling passes over NaN, and with current scaling a tensor with NaN in it keeps
/// them by any scale.
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
