//! Layers that reduce gradients.

use super::devices::Leased;
use std::sync::Arc;

use burn::{
    backend::{Flex, tensor::FloatTensor},
    module::ParamId,
    tensor::{
        Device, Tensor, TensorData,
        distributed::{DistributedConfig, DistributedContext, ReduceOperation},
    },
};
use burn_backend::{DeviceId, distributed, ops::FloatTensorOps};
use burn_layer::{FloatView, Layer, Layers, Reduced};

/// Gives gradients back doubled, in one of the three ways.
#[derive(Clone, Copy, Debug)]
enum Double {
    Ready,
    Deferred,
    Primitive,
}

impl Layer for Double {
    fn all_reduce(
        &self,
        tensor: FloatView<'_>,
        _op: distributed::ReduceOperation,
        _devices: &[DeviceId],
    ) -> Option<Reduced> {
        let own = tensor.downcast_ref::<FloatTensor<Flex>>().unwrap().clone();
        let doubled = move || Flex::float_mul_scalar(own.clone(), 2.0.into());
        let read = tensor.read().unwrap();
        let data: Vec<f32> = read.iter::<f32>().map(|x| 2.0 * x).collect();
        let data = TensorData::new(data, tensor.shape());
        Some(match self {
            Self::Ready => Reduced::Ready(data),
            Self::Deferred => Reduced::Deferred(Arc::new(move || data.clone())),
            Self::Primitive => Reduced::DeferredPrimitive(Arc::new(move || Box::new(doubled()))),
        })
    }

    fn sync_collective(&self) -> bool {
        true
    }
}

#[test]
fn reduced_gradients_come_back_ready_or_later_from_the_host_or_the_device() {
    for double in [Double::Ready, Double::Deferred, Double::Primitive] {
        let device = Layers::on(Device::flex()).layer(double).leased();
        let device = device.autodiff();
        let config = DistributedConfig {
            all_reduce_op: ReduceOperation::Mean,
        };
        let context = DistributedContext::init(vec![device.clone()], config);
        let weight = Tensor::<1>::from_floats([1.0, 2.0], &device)
            .require_grad()
            .set_distributed(ParamId::new());
        let gradients = weight.clone().powi_scalar(2).sum().backward();
        drop(context);
        let gradient = weight.grad(&gradients).unwrap().into_data();
        // Of x² it is 2x.
        assert_eq!(
            gradient.try_to_vec::<f32>().unwrap(),
            [4.0, 8.0],
            "{double:?}"
        );
    }
}
