//! The operation on a served device: it travels by name, and runs on the backend that serves.
//!
//! The process group is found by its id, so that the server has to be in the client's process, as
//! it is for layered devices.

use std::sync::Arc;

use burn::{
    backend::tensor::FloatTensor,
    tensor::{DType, Shape},
};
use burn_ir::{
    BackendIr, CustomOpIr, HandleContainer, OperationIr, OperationOutput, ScalarIr, TensorIr,
};
use burn_layer::Handlers;
use burn_router::{BackendRouter, CustomOpHandler, CustomOpRegistry, RouterChannel, RouterClient};

use super::backends::{SyncBatchNormOps, Three};

const FORWARD: &str = "ddp::sync_batch_norm";
const BACKWARD: &str = "ddp::sync_batch_norm_backward";

/// Lets a layered device run [`SyncBatchNorm`](crate::SyncBatchNorm): to be given to
/// [`Layers::custom_ops`](burn_layer::Layers::custom_ops), for each backend that may be underneath.
///
/// ```
/// use burn::{backend::Flex, tensor::Device};
/// use burn_ddp::custom_ops;
/// use burn_layer::Layers;
///
/// let device = Layers::on(Device::flex()).custom_ops::<Flex>(custom_ops()).serve()?;
/// # let _ = device;
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
pub fn custom_ops<B: BackendIr + SyncBatchNormOps>() -> Handlers<B> {
    handlers::<B>().into_iter().collect()
}

/// The same for a server of one's own: to be called on the registry with which it is built. The
/// server has to be in the client's process.
pub fn register_custom_ops<B: BackendIr + SyncBatchNormOps>(registry: &mut CustomOpRegistry<B>) {
    for (name, handler) in handlers::<B>() {
        registry.register(name, move |handles, desc, device| {
            handler(handles, desc, device)
        });
    }
}

fn handlers<B: BackendIr + SyncBatchNormOps>() -> [(&'static str, CustomOpHandler<B>); 2] {
    let forward: CustomOpHandler<B> = Arc::new(|handles, desc, _device| {
        let ([x, gamma, beta], outputs) = desc.as_fixed::<3, 3>();
        let (group, epsilon) = scalars(desc);
        let result = B::sync_batch_norm(
            handles.get_float_tensor::<B>(x),
            handles.get_float_tensor::<B>(gamma),
            handles.get_float_tensor::<B>(beta),
            group,
            epsilon,
        );
        put::<B>(handles, outputs, result);
    });
    let backward: CustomOpHandler<B> = Arc::new(|handles, desc, _device| {
        let ([x, gamma, mean, variance, grad], outputs) = desc.as_fixed::<5, 3>();
        let (group, epsilon) = scalars(desc);
        let result = B::sync_batch_norm_backward(
            handles.get_float_tensor::<B>(x),
            handles.get_float_tensor::<B>(gamma),
            handles.get_float_tensor::<B>(mean),
            handles.get_float_tensor::<B>(variance),
            handles.get_float_tensor::<B>(grad),
            group,
            epsilon,
        );
        put::<B>(handles, outputs, result);
    });
    [(FORWARD, forward), (BACKWARD, backward)]
}

fn scalars(desc: &CustomOpIr) -> (u64, f64) {
    match desc.scalars.as_slice() {
        [ScalarIr::UInt(group), ScalarIr::Float(epsilon)] => (*group, *epsilon),
        other => panic!("{} takes a group and an epsilon, not {other:?}", desc.id),
    }
}

fn put<B: BackendIr>(
    handles: &mut HandleContainer<B::Handle>,
    outputs: &[TensorIr; 3],
    (first, second, third): Three<B>,
) {
    for (output, tensor) in outputs.iter().zip([first, second, third]) {
        handles.register_float_tensor::<B>(&output.id, tensor);
    }
}

/// Sends an operation with three outputs of the given shapes and types.
fn submit<C: RouterChannel>(
    client: &C::Client,
    name: &'static str,
    inputs: &[TensorIr],
    outputs: [(Shape, DType); 3],
    group: u64,
    epsilon: f64,
) -> Three<BackendRouter<C>> {
    let outputs =
        outputs.map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype));
    let scalars = vec![ScalarIr::UInt(group), ScalarIr::Float(epsilon)];
    let desc = CustomOpIr::with_scalars(name, inputs, &outputs, scalars);
    let [first, second, third] = client.register(OperationIr::Custom(desc)).outputs();
    (first, second, third)
}

impl<C: RouterChannel> SyncBatchNormOps for BackendRouter<C> {
    fn sync_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        group: u64,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let client = x.client.clone();
        let [x, gamma, beta] = [x.into_ir(), gamma.into_ir(), beta.into_ir()];
        let statistics = match x.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let outputs = [
            (x.shape.clone(), x.dtype),
            (gamma.shape.clone(), statistics),
            (gamma.shape.clone(), statistics),
        ];
        submit::<C>(&client, FORWARD, &[x, gamma, beta], outputs, group, epsilon)
    }

    fn sync_batch_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        group: u64,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let client = x.client.clone();
        let inputs = [x, gamma, mean, variance, grad].map(|tensor| tensor.into_ir());
        let outputs =
            [&inputs[0], &inputs[1], &inputs[1]].map(|like| (like.shape.clone(), like.dtype));
        submit::<C>(&client, BACKWARD, &inputs, outputs, group, epsilon)
    }
}
