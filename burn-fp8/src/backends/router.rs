//! Remote devices: the ops are sent by name, and the served backend runs them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::FloatDType;
use burn_ir::{BackendIr, OperationIr, OperationOutput};
use burn_router::{
    BackendRouter, CustomOpHandler, CustomOpRegistry, RouterChannel, RouterClient, RouterTensor,
};
use std::sync::Arc;

use crate::{
    Bias, Fp8Cast, Fp8Format, Fp8Ops, Granularity, MatmulSpec, custom,
    provider::{Native, Portable, Provider},
    recipe::ScaleUpdate,
};

/// The fp8 ops by name, run by the kernels of `B`. Give them to `Layers::custom_ops` of burn-layer, so that a layered device over
/// `B` can run them.
pub fn custom_ops<B: BackendIr + Fp8Ops>() -> Vec<(&'static str, CustomOpHandler<B>)> {
    handlers::<B, Native>()
}

/// Registers the fp8 ops, run by the kernels of `B`, for a server of `B` or an interpreter of its graphs.
///
/// Give the registry to `BackendServer::with_custom_ops`.
pub fn register_fp8_ops<B: BackendIr + Fp8Ops>(registry: &mut CustomOpRegistry<B>) {
    register(registry, handlers::<B, Native>());
}

/// Registers the fp8 ops for any backend, composed of Burn's standard ops: also bit-exact, but slower. This is meant for backends
/// that wrap another and have no kernels of their own.
pub fn register_portable_fp8_ops<B: BackendIr>(registry: &mut CustomOpRegistry<B>) {
    register(registry, handlers::<B, Portable>());
}

fn handlers<B: BackendIr, P: Provider<B>>() -> Vec<(&'static str, CustomOpHandler<B>)> {
    let handler: CustomOpHandler<B> =
        Arc::new(|handles, desc, _| custom::execute::<B, P>(handles, desc));
    custom::ALL.map(|id| (id, handler.clone())).to_vec()
}

fn register<B: BackendIr>(
    registry: &mut CustomOpRegistry<B>,
    ops: Vec<(&'static str, CustomOpHandler<B>)>,
) {
    for (id, handler) in ops {
        registry.register(id, move |handles, desc, device| {
            handler(handles, desc, device)
        });
    }
}

fn submit<C: RouterClient, const N: usize>(
    client: &C,
    desc: custom::Description,
) -> [RouterTensor<C>; N] {
    let desc = desc.with_ids(|| client.create_empty_handle());
    client.register(OperationIr::Custom(desc)).outputs()
}

impl<C: RouterChannel> Fp8Ops for BackendRouter<C> {
    custom::lazy_ops!(submit);
}
