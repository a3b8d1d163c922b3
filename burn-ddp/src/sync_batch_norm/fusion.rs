//! The operation under Burn's fusion of the ops of served devices: it waits in the queue of its stream like any other.

use burn::backend::tensor::FloatTensor;
use burn_fusion::{
    ExecutionError, Fusion, FusionBackend, FusionRuntime, FusionTensor,
    client::GlobalFusionClient,
    custom::{CustomOpIr, HandleContainer, Operation, OperationIr, OperationOutput, StreamId},
};
use core::marker::PhantomData;

use super::{
    backends::{SyncBatchNormOps, Three},
    remote::{backward_of, execute, forward_of, lazy_sync_batch_norm},
};
use crate::ProcessGroup;

#[derive(Debug)]
struct Waiting<B> {
    desc: CustomOpIr,
    backend: PhantomData<B>,
}

impl<B: FusionBackend + SyncBatchNormOps> Operation<B::FusionRuntime> for Waiting<B> {
    fn execute(
        &self,
        handles: &mut HandleContainer<<B::FusionRuntime as FusionRuntime>::FusionHandle>,
    ) -> Result<(), ExecutionError> {
        execute::<B>(handles, &self.desc);
        Ok(())
    }
}

fn submit<B: FusionBackend + SyncBatchNormOps>(
    client: &GlobalFusionClient<B::FusionRuntime>,
    desc: CustomOpIr,
) -> [FusionTensor<B::FusionRuntime>; 3] {
    let operation = Waiting::<B> {
        desc: desc.clone(),
        backend: PhantomData,
    };
    client
        .register(StreamId::current(), OperationIr::Custom(desc), operation)
        .outputs()
}

impl<B: FusionBackend + SyncBatchNormOps> SyncBatchNormOps for Fusion<B> {
    lazy_sync_batch_norm!(submit::<B>);
}
