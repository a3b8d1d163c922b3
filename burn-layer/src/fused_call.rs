//! Calls of a backend that fuses ops: they wait in its stream as custom operations.

use burn_backend::{DType, Shape, tensor::FloatTensor};
use burn_fusion::{
    ExecutionError, Fusion, FusionBackend, FusionRuntime,
    client::GlobalFusionClient,
    custom::{CustomOpIr, HandleContainer, Operation, OperationIr, OperationOutput, StreamId},
};
use burn_ir::TensorIr;

/// The tensors of the backend underneath, by their ids.
pub(crate) type Handles<B> =
    HandleContainer<<<B as FusionBackend>::FusionRuntime as FusionRuntime>::FusionHandle>;

/// Takes the inputs, calls the backend underneath, and registers the outputs.
type Run<B> = Box<dyn Fn(&CustomOpIr, &mut Handles<B>) + Send + Sync>;

type Client<B> = GlobalFusionClient<<B as FusionBackend>::FusionRuntime>;

struct Waiting<B: FusionBackend> {
    desc: CustomOpIr,
    run: Run<B>,
}

impl<B: FusionBackend> core::fmt::Debug for Waiting<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.desc.fmt(f)
    }
}

impl<B: FusionBackend> Operation<B::FusionRuntime> for Waiting<B> {
    fn execute(&self, handles: &mut Handles<B>) -> Result<(), ExecutionError> {
        (self.run)(&self.desc, handles);
        Ok(())
    }
}

/// The outputs of a call.
pub(crate) fn submit<B: FusionBackend, const N: usize>(
    name: &'static str,
    client: Client<B>,
    inputs: &[TensorIr],
    outputs: [(Shape, DType); N],
    run: impl Fn(&CustomOpIr, &mut Handles<B>) + Send + Sync + 'static,
) -> [FloatTensor<Fusion<B>>; N] {
    let uninit = |(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype);
    let desc = CustomOpIr::new(name, inputs, &outputs.map(uninit));
    let waiting = Waiting::<B> {
        desc: desc.clone(),
        run: Box::new(run),
    };
    client
        .register(StreamId::current(), OperationIr::Custom(desc), waiting)
        .outputs()
}

/// Registers the outputs of a call.
pub(crate) fn register<B: FusionBackend, const N: usize>(
    desc: &CustomOpIr,
    handles: &mut Handles<B>,
    outputs: [FloatTensor<B>; N],
) {
    for (output, tensor) in desc.outputs.iter().zip(outputs) {
        handles.register_float_tensor::<B>(&output.id, tensor);
    }
}
