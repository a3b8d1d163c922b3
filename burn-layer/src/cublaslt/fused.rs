//! Products on a backend that fuses ops: they wait in its stream as custom operations.

use super::{Multiplies, over_rows_shape, product_shape};
use burn_backend::{Shape, TensorMetadata, tensor::FloatTensor};
use burn_fusion::{
    ExecutionError, Fusion, FusionBackend, FusionRuntime,
    custom::{CustomOpIr, HandleContainer, Operation, OperationIr, OperationOutput, StreamId},
};
use burn_ir::TensorIr;

/// A product of the backend underneath, as an operation.
#[derive(Debug)]
struct Waiting<B: FusionBackend> {
    desc: CustomOpIr,
    product: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
}

impl<B: FusionBackend> Operation<B::FusionRuntime> for Waiting<B> {
    fn execute(
        &self,
        handles: &mut HandleContainer<<B::FusionRuntime as FusionRuntime>::FusionHandle>,
    ) -> Result<(), ExecutionError> {
        let ([x, y], [output]) = self.desc.as_fixed();
        let [x, y] = [x, y].map(|factor| handles.get_float_tensor::<B>(factor));
        handles.register_float_tensor::<B>(&output.id, (self.product)(x, y));
        Ok(())
    }
}

impl<B: FusionBackend + Multiplies> Multiplies for Fusion<B> {
    fn product(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        let shape = product_shape(&x.shape(), &y.shape());
        submit::<B>("burn_layer::product", B::product, [x, y], shape)
    }

    fn over_rows(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        let shape = over_rows_shape(&x.shape(), &y.shape());
        submit::<B>("burn_layer::product_over_rows", B::over_rows, [x, y], shape)
    }
}

fn submit<B: FusionBackend>(
    name: &'static str,
    product: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
    factors: [FloatTensor<Fusion<B>>; 2],
    shape: Shape,
) -> FloatTensor<Fusion<B>> {
    let (client, dtype) = (factors[0].client.clone(), factors[0].dtype());
    let output = TensorIr::uninit(client.create_empty_handle(), shape, dtype);
    let desc = CustomOpIr::new(name, &factors.map(|factor| factor.into_ir()), &[output]);
    let waiting = Waiting::<B> {
        desc: desc.clone(),
        product,
    };
    let [product] = client
        .register(StreamId::current(), OperationIr::Custom(desc), waiting)
        .outputs();
    product
}
