//! Remote devices: the ops travel by name, and the served backend runs them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::FloatDType;
use burn_ir::{BackendIr, CustomOpIr, OperationIr, OperationOutput};
use burn_router::{
    BackendRouter, CustomOpHandler, CustomOpRegistry, RouterChannel, RouterClient, RouterTensor,
};
use std::sync::Arc;

use crate::{
    Bias, Fp8Format, Fp8Ops, MatmulSpec,
    custom::{self, Kernels, Native, Portable},
    recipe::ScaleUpdate,
};

/// The fp8 ops by name, run by the kernels of `B`: for `Layers::custom_ops` of burn-layer, which lets a layered device over
/// `B` run them.
pub fn custom_ops<B: BackendIr + Fp8Ops>() -> Vec<(&'static str, CustomOpHandler<B>)> {
    handlers::<B, Native>()
}

/// Register the fp8 ops, run by the kernels of `B`, for a server of `B` or an interpreter of its graphs.
///
/// Give the registry to `BackendServer::with_custom_ops`.
pub fn register_fp8_ops<B: BackendIr + Fp8Ops>(registry: &mut CustomOpRegistry<B>) {
    register(registry, handlers::<B, Native>());
}

/// Register the fp8 ops for any backend, made of Burn's standard ops: bit-exact too, but slower. It is meant for
/// backends that wrap another and have no kernels of their own.
pub fn register_portable_fp8_ops<B: BackendIr>(registry: &mut CustomOpRegistry<B>) {
    register(registry, handlers::<B, Portable>());
}

fn handlers<B: BackendIr, K: Kernels<B>>() -> Vec<(&'static str, CustomOpHandler<B>)> {
    let handler: CustomOpHandler<B> =
        Arc::new(|handles, desc, _| custom::execute_with::<B, K>(handles, desc));
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

fn submit<C: RouterClient, const N: usize>(client: &C, desc: CustomOpIr) -> [RouterTensor<C>; N] {
    client.register(OperationIr::Custom(desc)).outputs()
}

impl<C: RouterChannel> Fp8Ops for BackendRouter<C> {
    fn fp8_amax(input: FloatTensor<Self>) -> FloatTensor<Self> {
        let client = input.client.clone();
        let desc = custom::amax(input.into_ir(), || client.create_empty_handle());
        let [amax] = submit(&client, desc);
        amax
    }

    fn fp8_quantize(
        input: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        let client = input.client.clone();
        let desc = custom::quantize(input.into_ir(), scale.into_ir(), format, || {
            client.create_empty_handle()
        });
        let [codes, amax] = submit(&client, desc);
        (codes, amax)
    }

    fn fp8_dequantize(
        codes: IntTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let client = codes.client.clone();
        let desc = custom::dequantize(codes.into_ir(), scale.into_ir(), format, dtype, || {
            client.create_empty_handle()
        });
        let [values] = submit(&client, desc);
        values
    }

    fn fp8_matmul(
        lhs: IntTensor<Self>,
        rhs: IntTensor<Self>,
        lhs_scale: FloatTensor<Self>,
        rhs_scale: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: MatmulSpec,
    ) -> FloatTensor<Self> {
        let client = lhs.client.clone();
        let bias = match bias {
            Bias::None => None,
            Bias::Row(bias) => Some(bias.into_ir()),
        };
        let desc = custom::matmul(
            lhs.into_ir(),
            rhs.into_ir(),
            lhs_scale.into_ir(),
            rhs_scale.into_ir(),
            bias,
            spec,
            || client.create_empty_handle(),
        );
        let [product] = submit(&client, desc);
        product
    }

    fn fp8_update_scale(
        history: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        update: ScaleUpdate,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let client = history.client.clone();
        let desc = custom::update_scale(
            history.into_ir(),
            scale.into_ir(),
            amax.into_ir(),
            update,
            || client.create_empty_handle(),
        );
        let [history, scale] = submit(&client, desc);
        (history, scale)
    }
}
