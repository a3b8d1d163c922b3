//! Collectives: the layer's, or those of the backend underneath.

use crate::{Layer, Layered, LayeredFloat, Reduced};
use burn_backend::{
    DeviceId, TensorMetadata,
    distributed::{CollectiveTensor, DistributedOps, ReduceOperation},
    tensor::{Device, FloatTensor},
};
use burn_ir::BackendIr;

impl<L: Layer, B: BackendIr> DistributedOps<Self> for Layered<L, B> {
    fn all_reduce(
        tensor: FloatTensor<Self>,
        op: ReduceOperation,
        device_ids: Vec<DeviceId>,
    ) -> CollectiveTensor<Self> {
        let nominal = tensor.dtype();
        let layer = tensor.layer().clone();
        let tensor = tensor.into_nominal();
        let reduced = match layer.all_reduce::<B>(&tensor, op, &device_ids) {
            Some(Reduced::Ready(tensor)) => LayeredFloat::new(tensor, nominal, layer),
            Some(Reduced::Deferred(value)) => {
                LayeredFloat::deferred(value, &tensor, nominal, layer)
            }
            None => LayeredFloat::new(
                B::all_reduce(tensor, op, device_ids).resolve(),
                nominal,
                layer,
            ),
        };
        CollectiveTensor::new(reduced)
    }

    fn sync_collective(device: &Device<Self>) {
        if !device.layer().sync_collective::<B>(device.base()) {
            B::sync_collective(device.base());
        }
    }
}
