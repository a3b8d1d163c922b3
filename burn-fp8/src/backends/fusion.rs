//! Fusion: the ops wait in its stream as custom operations, whether the backend below is CubeCL's or a remote one.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::FloatDType;
use burn_fusion::{
    ExecutionError, Fusion, FusionBackend, FusionRuntime, FusionTensor,
    client::GlobalFusionClient,
    custom::{CustomOpIr, HandleContainer, Operation, OperationIr, OperationOutput, StreamId},
};
use core::marker::PhantomData;

use crate::{Bias, Fp8Format, Fp8Ops, MatmulSpec, custom, recipe::ScaleUpdate};

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
        custom::execute::<B>(handles, &self.desc);
        Ok(())
    }
}

fn submit<B: FusionBackend + Fp8Ops, const N: usize>(
    client: &GlobalFusionClient<B::FusionRuntime>,
    desc: CustomOpIr,
) -> [FusionTensor<B::FusionRuntime>; N] {
    let operation = Fp8Operation::<B> {
        desc: desc.clone(),
        backend: PhantomData,
    };
    client
        .register(StreamId::current(), OperationIr::Custom(desc), operation)
        .outputs()
}

impl<B: FusionBackend + Fp8Ops> Fp8Ops for Fusion<B> {
    fn fp8_amax(input: FloatTensor<Self>) -> FloatTensor<Self> {
        let client = input.client.clone();
        let desc = custom::amax(input.into_ir(), || client.create_empty_handle());
        let [amax] = submit::<B, _>(&client, desc);
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
        let [codes, amax] = submit::<B, _>(&client, desc);
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
        let [values] = submit::<B, _>(&client, desc);
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
        let [product] = submit::<B, _>(&client, desc);
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
        let [history, scale] = submit::<B, _>(&client, desc);
        (history, scale)
    }
}
