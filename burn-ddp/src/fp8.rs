//! Scales of fp8 layers, the same on all ranks.

use std::error::Error;

use burn::tensor::{Tensor, TensorData};
use burn_fp8::recipe::AmaxReducer;

use crate::{ProcessGroup, ReduceOp};

/// The largest amaxes over the ranks: give a [duplicate](ProcessGroup::duplicate) of the group to the fp8
/// layers of a model.
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
        let (device, dtype) = (amaxes.device(), amaxes.dtype());
        let mut values: Vec<f32> = amaxes.try_into_data()?.convert::<f32>().try_to_vec()?;
        self.all_reduce(&mut values, ReduceOp::Max)?;
        let count = values.len();
        let data = TensorData::new(values, [count]);
        Ok(Tensor::from_data(data, (&device, dtype)))
    }
}
