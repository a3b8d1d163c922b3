//! The operation on a served device: it is sent by name, and runs on the serving backend.
//!
//! The process group waits here for the operation, so the server must be in the client's process, as it is for layered devices.

use burn::{
    backend::{Remote, tensor::FloatTensor},
    remote::CustomOpClient,
    tensor::DType,
};
use burn_backend::TensorMetadata;
use burn_ir::{BackendIr, CustomOpIr, HandleContainer, OperationOutput, ScalarIr, TensorIr};
use burn_layer::{Layers, Op};
use burn_router::CustomOpHandler;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    backends::{SyncBatchNormOps, Three},
    compute::wide,
};
use crate::ProcessGroup;

const FORWARD: &str = "ddp::sync_batch_norm";
const BACKWARD: &str = "ddp::sync_batch_norm_backward";

/// The group handle of each operation that was sent but has not run yet, by a number that the operation carries.
static SENT: Mutex<BTreeMap<u64, ProcessGroup>> = Mutex::new(BTreeMap::new());

/// Keeps a handle, and returns its number.
fn hold(group: ProcessGroup) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut sent = SENT.lock().expect("no panic under lock");
    sent.insert(number, group);
    number
}

/// Takes the handle with this number.
fn take(number: u64) -> ProcessGroup {
    let group = SENT.lock().expect("no panic under lock").remove(&number);
    group.expect("an operation that was sent runs once, in the process that sent it")
}

/// The custom ops of [`SyncBatchNorm`](crate::SyncBatchNorm) by name, run by the kernels of `B`.
fn custom_ops<B: BackendIr + SyncBatchNormOps>() -> [(&'static str, CustomOpHandler<B>); 2] {
    [
        (
            FORWARD,
            Arc::new(|handles, desc, _| forward::<B>(handles, desc)),
        ),
        (
            BACKWARD,
            Arc::new(|handles, desc, _| backward::<B>(handles, desc)),
        ),
    ]
}

/// Lets a layered device run [`SyncBatchNorm`](crate::SyncBatchNorm), whichever device is below its layers.
///
/// On an autocast device its output and the gradient of its input are stored in 16 bits if the input is, as by PyTorch's.
///
/// ```
/// use burn::{nn::BatchNormConfig, tensor::{Device, Tensor}};
/// use burn_ddp::{ProcessGroup, SyncBatchNorm, with_custom_ops};
/// use burn_layer::Layers;
///
/// let group = ProcessGroup::single();
/// let device = with_custom_ops(Layers::on(Device::flex())).serve()?.autodiff();
/// let norm = SyncBatchNorm::new(&BatchNormConfig::new(2).init(&device), &group);
/// let out = norm.forward(Tensor::<3>::ones([4, 2, 3], &device));
/// assert_eq!(out.dims(), [4, 2, 3]);
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
pub fn with_custom_ops(layers: Layers) -> Layers {
    #[cfg(feature = "flex")]
    let layers = add::<burn::backend::Flex>(layers);
    #[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
    let layers = add::<burn::backend::Cube>(layers);
    layers
}

fn add<B: BackendIr + SyncBatchNormOps>(layers: Layers) -> Layers {
    layers.custom_ops_like::<B>(Op::batch_norm, custom_ops::<B>())
}

fn forward<B: BackendIr + SyncBatchNormOps>(
    handles: &mut HandleContainer<B::Handle>,
    desc: &CustomOpIr,
) {
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
}

fn backward<B: BackendIr + SyncBatchNormOps>(
    handles: &mut HandleContainer<B::Handle>,
    desc: &CustomOpIr,
) {
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
}

fn scalars(desc: &CustomOpIr) -> (ProcessGroup, f64) {
    match desc.scalars.as_slice() {
        [ScalarIr::UInt(group), ScalarIr::Float(epsilon)] => (take(*group), *epsilon),
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

/// Sends an operation with three outputs, each of the shape of an input and a dtype.
fn submit(
    client: &CustomOpClient,
    name: &'static str,
    inputs: &[TensorIr],
    outputs: [(&TensorIr, DType); 3],
    group: ProcessGroup,
    epsilon: f64,
) -> Three<Remote> {
    let outputs = outputs.map(|(like, dtype)| {
        TensorIr::uninit(client.create_empty_handle(), like.shape.clone(), dtype)
    });
    let scalars = vec![
        ScalarIr::UInt(hold(group.for_a_call())),
        ScalarIr::Float(epsilon),
    ];
    let desc = CustomOpIr::with_scalars(name, inputs, &outputs, scalars);
    let [first, second, third] = client.register(desc).outputs();
    (first, second, third)
}

/// With Burn's feature `fusion`, its client is another type, which `CustomOpClient` hides.
impl SyncBatchNormOps for Remote {
    fn sync_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        group: ProcessGroup,
        epsilon: f64,
    ) -> Three<Self> {
        let client = CustomOpClient::new(&x.device());
        let inputs = [x, gamma, beta].map(|tensor| tensor.into_ir());
        let [x, gamma, _] = &inputs;
        let statistics: DType = wide(x.dtype).into();
        let outputs = [(x, x.dtype), (gamma, statistics), (gamma, statistics)];
        submit(&client, FORWARD, &inputs, outputs, group, epsilon)
    }

    fn sync_batch_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        group: ProcessGroup,
        epsilon: f64,
    ) -> Three<Self> {
        let client = CustomOpClient::new(&x.device());
        let inputs = [x, gamma, mean, variance, grad].map(|tensor| tensor.into_ir());
        let [x, gamma, ..] = &inputs;
        let outputs = [(x, x.dtype), (gamma, gamma.dtype), (gamma, gamma.dtype)];
        submit(&client, BACKWARD, &inputs, outputs, group, epsilon)
    }
}
