//! The kernel on a backend that fuses ops.

use super::Rotates;
use crate::{
    fused_call::{register, submit},
    ops::Turn,
};
use burn_backend::tensor::FloatTensor;
use burn_fusion::{Fusion, FusionBackend};

impl<B: FusionBackend + Rotates> Rotates for Fusion<B> {
    fn turn(turn: Turn<Self>) -> FloatTensor<Self> {
        let Turn {
            x,
            matrix,
            factors,
            back,
            form,
        } = turn;
        let client = x.client.clone();
        let inputs = [x, matrix, factors].map(|tensor| tensor.into_ir());
        let outputs = [form.clone()];
        let name = "burn_layer::turn";
        let [tensor] = submit::<B, 1>(name, client, &inputs, outputs, move |desc, handles| {
            let ([x, matrix, factors], [_]) = desc.as_fixed();
            let [x, matrix, factors] =
                [x, matrix, factors].map(|input| handles.get_float_tensor::<B>(input));
            let turned = B::turn(Turn {
                x,
                matrix,
                factors,
                back,
                form: form.clone(),
            });
            register::<B, 1>(desc, handles, [turned]);
        });
        tensor
    }
}
