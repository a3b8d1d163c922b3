//! The kernels on a backend that fuses ops: they wait in its stream as custom operations.

use super::{Rowwise, of_rows};
use burn_backend::{
    DType, Shape, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_fusion::{
    ExecutionError, Fusion, FusionBackend, FusionRuntime,
    custom::{CustomOpIr, HandleContainer, Operation, OperationIr, OperationOutput, StreamId},
};
use burn_ir::TensorIr;

/// A call of the backend underneath, as an operation.
struct Waiting<B: FusionBackend> {
    desc: CustomOpIr,
    run: Run<B>,
}

type Handles<B> =
    HandleContainer<<<B as FusionBackend>::FusionRuntime as FusionRuntime>::FusionHandle>;

type Run<B> = fn(&CustomOpIr, &mut Handles<B>);

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

impl<B: FusionBackend + Rowwise> Rowwise for Fusion<B> {
    fn statistics(x: FloatTensor<Self>) -> [FloatTensor<Self>; 2] {
        let client = x.client.clone();
        let output = || {
            let (shape, dtype) = of_rows(&x.shape());
            TensorIr::uninit(client.create_empty_handle(), shape, dtype)
        };
        let outputs = [output(), output()];
        let desc = CustomOpIr::new("burn_layer::softmax_statistics", &[x.into_ir()], &outputs);
        let waiting = Waiting::<B> {
            desc: desc.clone(),
            run: |desc, handles| {
                let ([x], outputs) = desc.as_fixed();
                let outputs: &[TensorIr; 2] = outputs;
                let statistics = B::statistics(handles.get_float_tensor::<B>(x));
                for (output, tensor) in outputs.iter().zip(statistics) {
                    handles.register_float_tensor::<B>(&output.id, tensor);
                }
            },
        };
        client
            .register(StreamId::current(), OperationIr::Custom(desc), waiting)
            .outputs()
    }

    fn softmax_backward(
        of: [FloatTensor<Self>; 3],
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let form = (of[0].shape(), of[0].dtype());
        let [x, maxima, sums] = of;
        let inputs = [x, maxima, sums, gradient].map(|tensor| (tensor.client.clone(), tensor));
        let client = inputs[0].0.clone();
        let inputs = inputs.map(|(_, tensor)| tensor.into_ir());
        let run: Run<B> = |desc, handles| {
            let (inputs, [output]) = desc.as_fixed();
            let [x, maxima, sums, gradient] = inputs
                .each_ref()
                .map(|input| handles.get_float_tensor::<B>(input));
            let tensor = B::softmax_backward([x, maxima, sums], gradient);
            handles.register_float_tensor::<B>(&output.id, tensor);
        };
        one::<B>("burn_layer::softmax_backward", client, &inputs, form, run)
    }

    fn gathered_backward(
        of: [FloatTensor<Self>; 3],
        indices: IntTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let form = (of[0].shape(), of[0].dtype());
        let client = of[0].client.clone();
        let [x, maxima, factors] = of;
        let inputs = [x, maxima, factors, indices, gradient].map(|tensor| tensor.into_ir());
        let run: Run<B> = |desc, handles| {
            let ([x, maxima, factors, indices, gradient], [output]) = desc.as_fixed();
            let of = [x, maxima, factors].map(|input| handles.get_float_tensor::<B>(input));
            let indices = handles.get_int_tensor::<B>(indices);
            let gradient = handles.get_float_tensor::<B>(gradient);
            let tensor = B::gathered_backward(of, indices, gradient);
            handles.register_float_tensor::<B>(&output.id, tensor);
        };
        one::<B>("burn_layer::gathered_backward", client, &inputs, form, run)
    }
}

type Client<B> = burn_fusion::client::GlobalFusionClient<<B as FusionBackend>::FusionRuntime>;

/// The only output of a call.
fn one<B: FusionBackend>(
    name: &'static str,
    client: Client<B>,
    inputs: &[TensorIr],
    (shape, dtype): (Shape, DType),
    run: Run<B>,
) -> FloatTensor<Fusion<B>> {
    let output = TensorIr::uninit(client.create_empty_handle(), shape, dtype);
    let desc = CustomOpIr::new(name, inputs, &[output]);
    let waiting = Waiting::<B> {
        desc: desc.clone(),
        run,
    };
    let [tensor] = client
        .register(StreamId::current(), OperationIr::Custom(desc), waiting)
        .outputs();
    tensor
}
