//! The kernels on a backend that fuses ops.

use super::NormalizesChannels;
use crate::{
    channels::by_channel,
    fused_call::{register, submit},
};
use burn_backend::{DType, TensorMetadata, tensor::FloatTensor};
use burn_fusion::{Fusion, FusionBackend};

impl<B: FusionBackend + NormalizesChannels> NormalizesChannels for Fusion<B> {
    fn channel_moments(x: FloatTensor<Self>) -> [FloatTensor<Self>; 2] {
        let (client, form) = (x.client.clone(), (by_channel(&x.shape()), DType::F32));
        let outputs = [form.clone(), form];
        let name = "burn_layer::channel_moments";
        submit::<B, 2>(name, client, &[x.into_ir()], outputs, |desc, handles| {
            let ([x], [_, _]) = desc.as_fixed();
            let moments = B::channel_moments(handles.get_float_tensor::<B>(x));
            register::<B, 2>(desc, handles, moments);
        })
    }

    fn channel_sums(
        [a, b]: [FloatTensor<Self>; 2],
        center: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let (client, form) = (a.client.clone(), (by_channel(&a.shape()), DType::F32));
        let inputs = [a, b, center].map(|input| input.into_ir());
        let outputs = [form.clone(), form];
        let name = "burn_layer::channel_sums";
        submit::<B, 2>(name, client, &inputs, outputs, |desc, handles| {
            let ([a, b, center], [_, _]) = desc.as_fixed();
            let [a, b, center] = [a, b, center].map(|input| handles.get_float_tensor::<B>(input));
            register::<B, 2>(desc, handles, B::channel_sums([a, b], center));
        })
    }
}
