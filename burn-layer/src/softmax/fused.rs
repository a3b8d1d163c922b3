//! The kernels on a backend that fuses ops.

use super::Rowwise;
use crate::{fused_call::submit, rowwise::of_rows};
use burn_backend::{
    TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_fusion::{Fusion, FusionBackend};

impl<B: FusionBackend + Rowwise> Rowwise for Fusion<B> {
    fn statistics(x: FloatTensor<Self>) -> [FloatTensor<Self>; 2] {
        let (client, form) = (x.client.clone(), of_rows(&x.shape()));
        let name = "burn_layer::softmax_statistics";
        let outputs = [form.clone(), form];
        submit::<B, 2>(name, client, &[x.into_ir()], outputs, |desc, handles| {
            let ([x], [maxima, sums]) = desc.as_fixed();
            let statistics = B::statistics(handles.get_float_tensor::<B>(x));
            for (output, tensor) in [maxima, sums].into_iter().zip(statistics) {
                handles.register_float_tensor::<B>(&output.id, tensor);
            }
        })
    }

    fn softmax_backward(
        of: [FloatTensor<Self>; 3],
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (client, form) = (of[0].client.clone(), (of[0].shape(), of[0].dtype()));
        let [x, maxima, sums] = of;
        let inputs = [x, maxima, sums, gradient].map(|tensor| tensor.into_ir());
        let name = "burn_layer::softmax_backward";
        let [tensor] = submit::<B, 1>(name, client, &inputs, [form], |desc, handles| {
            let (inputs, [output]) = desc.as_fixed();
            let [x, maxima, sums, gradient] = inputs
                .each_ref()
                .map(|input| handles.get_float_tensor::<B>(input));
            let tensor = B::softmax_backward([x, maxima, sums], gradient);
            handles.register_float_tensor::<B>(&output.id, tensor);
        });
        tensor
    }

    fn gathered_backward(
        of: [FloatTensor<Self>; 3],
        indices: IntTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (client, form) = (of[0].client.clone(), (of[0].shape(), of[0].dtype()));
        let [x, maxima, factors] = of;
        let inputs = [x, maxima, factors, indices, gradient].map(|tensor| tensor.into_ir());
        let name = "burn_layer::gathered_backward";
        let [tensor] = submit::<B, 1>(name, client, &inputs, [form], |desc, handles| {
            let ([x, maxima, factors, indices, gradient], [output]) = desc.as_fixed();
            let of = [x, maxima, factors].map(|input| handles.get_float_tensor::<B>(input));
            let indices = handles.get_int_tensor::<B>(indices);
            let gradient = handles.get_float_tensor::<B>(gradient);
            let tensor = B::gathered_backward(of, indices, gradient);
            handles.register_float_tensor::<B>(&output.id, tensor);
        });
        tensor
    }
}
