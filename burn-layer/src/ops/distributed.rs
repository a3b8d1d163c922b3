//! Collectives: run by a layer, or by the backend underneath.

use crate::{Layered, LayeredFloat, Reduced, deferred::Deferred, reduce::Viewed, source::Later};
use burn_backend::{
    DeviceId, TensorMetadata,
    distributed::{CollectiveTensor, DistributedOps, ReduceOperation},
    tensor::{Device, FloatTensor},
};
use burn_ir::BackendIr;

impl<B: BackendIr> DistributedOps<Self> for Layered<B> {
    fn all_reduce(
        tensor: FloatTensor<Self>,
        op: ReduceOperation,
        device_ids: Vec<DeviceId>,
    ) -> CollectiveTensor<Self> {
        let nominal = tensor.dtype();
        let layer = tensor.layer().clone();
        let [gradient, computed] = [tensor.is_gradient(), tensor.is_computed()];
        let tensor = Viewed::<B>(tensor.into_nominal());
        let device = tensor.0.device();
        let form = (tensor.0.shape(), tensor.0.dtype());
        let deferred = |value: Deferred<FloatTensor<B>>, layer| {
            let (value, device) = (Later::Deferred(value), tensor.0.device());
            LayeredFloat::later(value, form, device, nominal, layer)
        };
        let reduced = match layer.all_reduce(tensor.view(), op, &device_ids) {
            Some(Reduced::Ready(data)) => {
                LayeredFloat::new(B::float_from_data(data, &device), nominal, layer)
            }
            Some(Reduced::Deferred(wait)) => {
                let value = Deferred::new(move || B::float_from_data(wait(), &device));
                deferred(value, layer)
            }
            Some(Reduced::DeferredPrimitive(wait)) => {
                let value = Deferred::new(move || {
                    let primitive = wait().downcast::<FloatTensor<B>>();
                    *primitive.expect("a layer returns tensors of the backend underneath")
                });
                deferred(value, layer)
            }
            None => {
                let reduced = B::all_reduce(tensor.0, op, device_ids).resolve();
                LayeredFloat::new(reduced, nominal, layer)
            }
        };
        CollectiveTensor::new(reduced.with_gradient(gradient).with_computed(computed))
    }

    fn sync_collective(device: &Device<Self>) {
        if !device.layer().sync_collective() {
            B::sync_collective(device.base());
        }
    }
}
