//! Convolutions on a backend that fuses ops.

use super::Convolves;
use crate::{
    fused_call::{register, submit},
    ops::Convolution,
};
use burn_backend::tensor::FloatTensor;
use burn_fusion::{Fusion, FusionBackend};

impl<B: FusionBackend + Convolves> Convolves for Fusion<B> {
    fn convolved(inputs: [FloatTensor<Self>; 2], of: Convolution) -> FloatTensor<Self> {
        let client = inputs[0].client.clone();
        let inputs = inputs.map(|input| input.into_ir());
        let (name, output) = ("burn_layer::convolution", [(of.shape(), of.dtype)]);
        let [output] = submit::<B, 1>(name, client, &inputs, output, move |desc, handles| {
            let ([a, b], [_]) = desc.as_fixed::<2, 1>();
            let [a, b] = [a, b].map(|input| handles.get_float_tensor::<B>(input));
            register::<B, 1>(desc, handles, [B::convolved([a, b], of.clone())]);
        });
        output
    }
}
