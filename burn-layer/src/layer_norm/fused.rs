//! The kernels on a backend that fuses ops.

use super::{Normalizes, gradient_dtype};
use crate::{
    fused_call::{Handles, register, submit},
    ops::NormBackward,
    rowwise::of_rows,
};
use burn_backend::{TensorMetadata, tensor::FloatTensor};
use burn_fusion::{Fusion, FusionBackend, custom::CustomOpIr};

impl<B: FusionBackend + Normalizes> Normalizes for Fusion<B> {
    fn moments(x: FloatTensor<Self>) -> [FloatTensor<Self>; 2] {
        let (client, form) = (x.client.clone(), of_rows(&x.shape()));
        let outputs = [form.clone(), form];
        let name = "burn_layer::moments";
        submit::<B, 2>(name, client, &[x.into_ir()], outputs, |desc, handles| {
            let ([x], [_, _]) = desc.as_fixed();
            let moments = B::moments(handles.get_float_tensor::<B>(x));
            register::<B, 2>(desc, handles, moments);
        })
    }

    fn mean_squares(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (client, form) = (x.client.clone(), of_rows(&x.shape()));
        let name = "burn_layer::mean_squares";
        let [means] = submit::<B, 1>(name, client, &[x.into_ir()], [form], |desc, handles| {
            let ([x], [_]) = desc.as_fixed();
            let means = B::mean_squares(handles.get_float_tensor::<B>(x));
            register::<B, 1>(desc, handles, [means]);
        });
        means
    }

    fn norm_backward(backward: NormBackward<Self>) -> FloatTensor<Self> {
        let dtype = gradient_dtype::<Self>(&backward.x, backward.added.as_ref());
        let (client, form) = (backward.x.client.clone(), (backward.x.shape(), dtype));
        let optional = [&backward.mean, &backward.scale, &backward.added].map(Option::is_some);
        let NormBackward {
            x,
            mean,
            deviation,
            gradient,
            scale,
            added,
        } = backward;
        let inputs = [x, deviation, gradient].into_iter();
        let inputs = inputs.chain(mean).chain(scale).chain(added);
        let inputs: Vec<_> = inputs.map(|tensor| tensor.into_ir()).collect();
        let name = "burn_layer::norm_backward";
        let [tensor] = submit::<B, 1>(name, client, &inputs, [form], move |desc, handles| {
            run::<B>(desc, handles, optional);
        });
        tensor
    }
}

/// Computes the gradient. The last inputs are the mean, if it is `centered`, the scale, if it is `scaled`, and what it `adds`.
fn run<B: FusionBackend + Normalizes>(
    desc: &CustomOpIr,
    handles: &mut Handles<B>,
    [centered, scaled, adds]: [bool; 3],
) {
    let mut inputs = desc.inputs.iter();
    let mut next = || {
        let input = inputs.next().expect("as many inputs as were submitted");
        handles.get_float_tensor::<B>(input)
    };
    let backward = NormBackward {
        x: next(),
        deviation: next(),
        gradient: next(),
        mean: centered.then(&mut next),
        scale: scaled.then(&mut next),
        added: adds.then(&mut next),
    };
    register::<B, 1>(desc, handles, [B::norm_backward(backward)]);
}
