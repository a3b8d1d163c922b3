//! The kernels on a backend that fuses ops.

use super::Rowwise;
use crate::{
    fused_call::{Handles, register, submit},
    ops::{Logits, Mask, Scale, SoftmaxBackward},
    rowwise::of_rows,
};
use burn_backend::{
    DType, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_fusion::{Fusion, FusionBackend, custom::CustomOpIr};
use burn_ir::TensorIr;

impl<B: FusionBackend + Rowwise> Rowwise for Fusion<B> {
    fn statistics(of: Logits<Self>) -> [FloatTensor<Self>; 2] {
        let (client, form) = (of.x.client.clone(), of_rows(&of.x.shape()));
        let name = "burn_layer::softmax_statistics";
        let outputs = [form.clone(), form];
        let (inputs, parts) = Parts::of(of);
        submit::<B, 2>(name, client, &inputs, outputs, move |desc, handles| {
            let (of, []) = parts.logits::<B, _>(desc, handles);
            register::<B, 2>(desc, handles, B::statistics(of));
        })
    }

    fn whole_softmax(of: Logits<Self>, dtype: DType) -> [FloatTensor<Self>; 3] {
        let (client, shape) = (of.x.client.clone(), of.x.shape());
        let form = of_rows(&shape);
        let name = "burn_layer::softmax_with_statistics";
        let outputs = [form.clone(), form, (shape, dtype)];
        let (inputs, parts) = Parts::of(of);
        submit::<B, 3>(name, client, &inputs, outputs, move |desc, handles| {
            let (of, []) = parts.logits::<B, _>(desc, handles);
            register::<B, 3>(desc, handles, B::whole_softmax(of, dtype));
        })
    }

    fn softmax_forward(
        of: Logits<Self>,
        statistics: [FloatTensor<Self>; 2],
        dtype: DType,
    ) -> FloatTensor<Self> {
        let (client, form) = (of.x.client.clone(), (of.x.shape(), dtype));
        let (mut inputs, parts) = Parts::of(of);
        inputs.extend(statistics.map(|tensor| tensor.into_ir()));
        let name = "burn_layer::softmax";
        let [tensor] = submit::<B, 1>(name, client, &inputs, [form], move |desc, handles| {
            let (of, [maxima, sums]) = parts.logits::<B, _>(desc, handles);
            let statistics = [maxima, sums].map(|input| handles.get_float_tensor::<B>(input));
            register::<B, 1>(desc, handles, [B::softmax_forward(of, statistics, dtype)]);
        });
        tensor
    }

    fn softmax_backward(backward: SoftmaxBackward<Self>) -> FloatTensor<Self> {
        let SoftmaxBackward {
            of,
            maxima,
            sums,
            gradient,
            masked,
            scale,
        } = backward;
        let (client, form) = (of.x.client.clone(), (of.x.shape(), of.x.dtype()));
        let (mut inputs, parts) = Parts::of(of);
        inputs.extend([maxima, sums, gradient].map(|tensor| tensor.into_ir()));
        let name = "burn_layer::softmax_backward";
        let [tensor] = submit::<B, 1>(name, client, &inputs, [form], move |desc, handles| {
            let (of, others) = parts.logits::<B, _>(desc, handles);
            let [maxima, sums, gradient] =
                others.map(|input: &TensorIr| handles.get_float_tensor::<B>(input));
            let tensor = B::softmax_backward(SoftmaxBackward {
                of,
                maxima,
                sums,
                gradient,
                masked,
                scale,
            });
            register::<B, 1>(desc, handles, [tensor]);
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
            let ([x, maxima, factors, indices, gradient], [_]) = desc.as_fixed();
            let of = [x, maxima, factors].map(|input| handles.get_float_tensor::<B>(input));
            let indices = handles.get_int_tensor::<B>(indices);
            let gradient = handles.get_float_tensor::<B>(gradient);
            let tensor = B::gathered_backward(of, indices, gradient);
            register::<B, 1>(desc, handles, [tensor]);
        });
        tensor
    }
}

/// What logits are made of, besides tensors.
struct Parts {
    scale: Scale,
    fill: Option<f32>,
}

impl Parts {
    /// These, and the tensors, which are the first inputs of an operation.
    fn of<B: FusionBackend>(logits: Logits<Fusion<B>>) -> (Vec<TensorIr>, Self) {
        let Logits { x, scale, mask } = logits;
        let fill = mask.as_ref().map(|mask| mask.fill);
        let mask = mask.map(|mask| mask.elements.into_ir());
        let inputs = [x.into_ir()].into_iter().chain(mask).collect();
        (inputs, Self { scale, fill })
    }

    /// The logits, and the operation's other inputs.
    fn logits<'a, B: FusionBackend, const N: usize>(
        &self,
        desc: &'a CustomOpIr,
        handles: &mut Handles<B>,
    ) -> (Logits<B>, [&'a TensorIr; N]) {
        let mut inputs = desc.inputs.iter();
        let mut next = || inputs.next().expect("as many inputs as were submitted");
        let x = handles.get_float_tensor::<B>(next());
        let mask = self.fill.map(|fill| Mask {
            elements: handles.get_bool_tensor::<B>(next()),
            fill,
        });
        let scale = self.scale;
        (Logits { x, scale, mask }, [(); N].map(|()| next()))
    }
}
