//! Fusion: the ops wait in its stream as custom operations, over CubeCL's backend or a remote one.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::FloatDType;
use burn_fusion::{
    ExecutionError, Fusion, FusionBackend, FusionRuntime, FusionTensor,
    client::GlobalFusionClient,
    custom::{CustomOpIr, HandleContainer, Operation, OperationIr, OperationOutput, StreamId},
};
use core::marker::PhantomData;

use crate::{
    Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, MatmulSpec, custom, provider::Native,
    recipe::ScaleUpdate,
};

#[derive(Debug)]
struct Fp8Operation<B> {
    desc: CustomOpIr,
    backend: PhantomData<B>,
}

impl<B: FusionBackend + Fp8Ops> Operation<B::FusionRuntime> for Fp8Operation<B> {
    fn execute(
        &self,
        handles: &mut HandleContainer<<B::FusionRuntime as FusionRuntime>::FusionHandle>,
    ) -> Result<(), ExecutionError> {
        custom::execute::<B, Native>(handles, &self.desc);
        Ok(())
    }
}

fn submit<B: FusionBackend + Fp8Ops, const N: usize>(
    client: &GlobalFusionClient<B::FusionRuntime>,
    desc: custom::Description,
) -> [FusionTensor<B::FusionRuntime>; N] {
    let desc = desc.with_ids(|| client.create_empty_handle());
    let operation = Fp8Operation::<B> {
        desc: desc.clone(),
        backend: PhantomData,
    };
    client
        .register(StreamId::current(), OperationIr::Custom(desc), operation)
        .outputs()
}

impl<B: FusionBackend + Fp8Ops> Fp8Ops for Fusion<B> {
    custom::lazy_ops!(submit::<B, _>);
}
