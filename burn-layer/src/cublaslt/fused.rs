//! Products on a backend that fuses ops.

use super::{Multiplies, over_rows_shape, product_shape};
use crate::fused_call::{Handles, submit};
use burn_backend::{Shape, TensorMetadata, tensor::FloatTensor};
use burn_fusion::{Fusion, FusionBackend, custom::CustomOpIr};

impl<B: FusionBackend + Multiplies> Multiplies for Fusion<B> {
    fn product(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        let shape = product_shape(&x.shape(), &y.shape());
        multiplied::<B>("burn_layer::product", [x, y], shape, B::product)
    }

    fn over_rows(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        let shape = over_rows_shape(&x.shape(), &y.shape());
        let name = "burn_layer::product_over_rows";
        multiplied::<B>(name, [x, y], shape, B::over_rows)
    }
}

fn multiplied<B: FusionBackend>(
    name: &'static str,
    factors: [FloatTensor<Fusion<B>>; 2],
    shape: Shape,
    multiply: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<Fusion<B>> {
    let (client, dtype) = (factors[0].client.clone(), factors[0].dtype());
    let factors = factors.map(|factor| factor.into_ir());
    let output = [(shape, dtype)];
    let [product] = submit::<B, 1>(name, client, &factors, output, move |desc, handles| {
        run::<B>(desc, handles, multiply);
    });
    product
}

fn run<B: FusionBackend>(
    desc: &CustomOpIr,
    handles: &mut Handles<B>,
    multiply: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) {
    let ([x, y], [output]) = desc.as_fixed();
    let [x, y] = [x, y].map(|factor| handles.get_float_tensor::<B>(factor));
    handles.register_float_tensor::<B>(&output.id, multiply(x, y));
}
