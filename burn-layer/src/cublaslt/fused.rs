//! Products on a backend that fuses ops: they wait in its stream as custom operations.

use super::{Multiplies, shape_of};
use burn_backend::{TensorMetadata, tensor::FloatTensor};
use burn_fusion::{
    ExecutionError, Fusion, FusionBackend, FusionRuntime,
    custom::{CustomOpIr, HandleContainer, Operation, OperationIr, OperationOutput, StreamId},
};
use burn_ir::TensorIr;
use core::marker::PhantomData;

#[derive(Debug)]
struct Product<B> {
    desc: CustomOpIr,
    backend: PhantomData<B>,
}

impl<B: FusionBackend + Multiplies> Operation<B::FusionRuntime> for Product<B> {
    fn execute(
        &self,
        handles: &mut HandleContainer<<B::FusionRuntime as FusionRuntime>::FusionHandle>,
    ) -> Result<(), ExecutionError> {
        let ([x, y], [output]) = self.desc.as_fixed();
        let [x, y] = [x, y].map(|factor| handles.get_float_tensor::<B>(factor));
        handles.register_float_tensor::<B>(&output.id, B::multiply(x, y));
        Ok(())
    }
}

impl<B: FusionBackend + Multiplies> Multiplies for Fusion<B> {
    fn multiply(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        let (client, dtype) = (x.client.clone(), x.dtype());
        let shape = shape_of(&x.shape(), &y.shape());
        let output = TensorIr::uninit(client.create_empty_handle(), shape, dtype);
        let factors = [x.into_ir(), y.into_ir()];
        let desc = CustomOpIr::new("burn_layer::product", &factors, &[output]);
        let operation = Product::<B> {
            desc: desc.clone(),
            backend: PhantomData,
        };
        let [product] = client
            .register(StreamId::current(), OperationIr::Custom(desc), operation)
            .outputs();
        product
    }
}
