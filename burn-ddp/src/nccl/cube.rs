//! Converts Burn's tensors to CubeCL's, and back.

use std::any::Any;

use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{
        Shape, Tensor,
        kind::{Autodiff, Numeric},
    },
};
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::{Cube, CubeBackend, CubeDevice, tensor::CubeTensor};
use burn_dispatch::{BackendTensor, DispatchKindConversion, DispatchTensor};
use burn_fusion::{Fusion, FusionBackend, NoOp, custom::StreamId};
use burn_ir::{InitOperationIr, OperationIr, OperationOutput};
use burn_layer::FloatView;

/// A backend whose tensors are CubeCL's, or become CubeCL's once deferred ops are executed.
trait Resolve: Backend {
    fn resolve(tensor: FloatTensor<Self>) -> CubeTensor;
    fn wrap(tensor: CubeTensor) -> FloatTensor<Self>;
}

impl Resolve for CubeBackend {
    fn resolve(tensor: FloatTensor<Self>) -> CubeTensor {
        tensor
    }

    fn wrap(tensor: CubeTensor) -> FloatTensor<Self> {
        tensor
    }
}

impl<B> Resolve for Fusion<B>
where
    B: FusionBackend<FloatTensorPrimitive = CubeTensor>,
{
    fn resolve(tensor: FloatTensor<Self>) -> CubeTensor {
        // CubeCL does not distinguish kinds of tensors, so that this works for all.
        let client = tensor.client.clone();
        client.resolve_tensor_float::<B>(tensor)
    }

    fn wrap(tensor: CubeTensor) -> FloatTensor<Self> {
        let client = burn_fusion::get_client::<B>(&device_of::<B>(&tensor));
        let (shape, dtype) = (tensor.shape(), tensor.dtype);
        let handle = B::float_tensor_handle(tensor);
        let desc = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
        client
            .register(
                StreamId::current(),
                OperationIr::Init(desc),
                NoOp::<B>::new(),
            )
            .output()
    }
}

fn device_of<B: Backend>(tensor: &FloatTensor<B>) -> B::Device {
    tensor.device()
}

/// The ordinal of a CUDA device. `None` for the device of another backend.
pub(crate) fn cuda_ordinal<T: 'static>(device: &T) -> Option<usize> {
    match (device as &dyn Any).downcast_ref()? {
        CubeDevice::Cuda(device) => Some(device.index),
        _ => None,
    }
}

/// The CubeCL tensor behind a backend's primitive. `None` if the backend is not CubeCL's.
pub(crate) fn primitive_to_cube<P: Clone + 'static>(primitive: &P) -> Option<CubeTensor> {
    let primitive = (primitive as &dyn Any).downcast_ref::<FloatTensor<Cube>>()?;
    Some(Cube::resolve(primitive.clone()))
}

/// A CubeCL tensor as the primitive type `P`. `None` if `P` does not belong to CubeCL's backend.
pub(crate) fn primitive_from_cube<P: 'static>(tensor: CubeTensor) -> Option<P> {
    let primitive: Box<dyn Any> = Box::new(Cube::wrap(tensor));
    primitive.downcast().ok().map(|primitive| *primitive)
}

/// The CubeCL tensor behind a tensor, without its autodiff history. `None` if it is not CubeCL's.
pub(crate) fn tensor_to_cube<const D: usize, K: Autodiff>(
    tensor: Tensor<D, K>,
) -> Option<CubeTensor> {
    let tensor = tensor.without_autodiff().into_dispatch();
    match <DispatchTensor as DispatchKindConversion<Cube>>::try_into_backend(tensor).ok()? {
        BackendTensor::Float(primitive) | BackendTensor::Int(primitive) => {
            Some(Cube::resolve(primitive))
        }
        _ => None,
    }
}

/// A CubeCL tensor as a tensor on the plain device.
///
/// # Panics
///
/// Panics if the kind or the number of dimensions differs.
pub(crate) fn tensor_from_cube<const D: usize, K: Numeric>(tensor: CubeTensor) -> Tensor<D, K> {
    let is_float = tensor.dtype.is_float();
    let primitive = Cube::wrap(tensor);
    let tensor: BackendTensor<Cube> = match is_float {
        true => BackendTensor::Float(primitive),
        false => BackendTensor::Int(primitive),
    };
    Tensor::from_dispatch(DispatchTensor::from_backend(tensor))
}

/// The device of the tensor behind a view. `None` if the tensor is not CubeCL's.
pub(crate) fn view_device(view: FloatView<'_>) -> Option<CubeDevice> {
    let primitive = view.downcast_ref::<FloatTensor<Cube>>()?;
    Some(primitive.device())
}

/// The tensor behind a view, reshaped to one dimension. `None` if the tensor is not CubeCL's.
pub(crate) fn view_tensor(view: FloatView<'_>) -> Option<Tensor<1>> {
    let primitive = view.downcast_ref::<FloatTensor<Cube>>()?.clone();
    let len = primitive.shape().num_elements();
    let flat = Cube::float_reshape(primitive, [len].into());
    Some(Tensor::from_primitive::<Cube>(flat))
}

/// A CubeCL tensor, reshaped to `shape`, as its backend's primitive.
///
/// # Panics
///
/// Panics if the tensor is not CubeCL's.
pub(crate) fn boxed_primitive(tensor: Tensor<1>, shape: Shape) -> Box<dyn Any> {
    let primitive = tensor
        .try_into_primitive::<Cube>()
        .expect("the tensor is CubeCL's");
    Box::new(Cube::float_reshape(primitive, shape))
}
