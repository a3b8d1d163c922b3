//! The gradient of a convolution's weight.

use super::{
    Backward, Sizes, is_tall,
    library::{Wanted, by_library},
    rows,
};
use crate::{LayerSet, ops::batch::over_rows};
use burn_backend::{Backend, Shape, Slice, TensorMetadata, ops::ConvOptions, tensor::FloatTensor};

/// The gradient of the weight, as a product, or by a library, or of some output channels after the other, if the backend would try a tall
/// product.
pub(in crate::ops) fn weight_backward<B: Backend, const N: usize>(
    layers: &LayerSet,
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    grad: FloatTensor<B>,
    options: ConvOptions<N>,
    backward: Backward<B, N>,
) -> FloatTensor<B> {
    let sizes = Sizes::of::<B>(layers, &x, &weight, &options);
    let is_product = |sizes: &Sizes<N>| {
        let one_pixel = sizes.output.iter().product::<usize>() == 1;
        let (outs, weights) = (sizes.outs, sizes.weights());
        sizes.is_product(is_tall(outs, weights) || one_pixel && is_tall(weights, outs))
    };
    match &sizes {
        Some(sizes) if sizes.has_large_patches() => {
            return sizes.patch_weight_backward::<B>(layers, x, weight.shape(), grad);
        }
        Some(sizes) if is_product(sizes) && !sizes.is_strided() => {
            return pointwise::<B, N>(layers, sizes, x, weight.shape(), grad);
        }
        _ => {}
    }
    let shapes = [x.shape(), weight.shape()];
    let inputs = [&x, &grad];
    if let Some(grad) = by_library::<B, N>(layers, Wanted::WeightGradient, inputs, shapes, &options)
    {
        return grad;
    }
    match sizes {
        Some(sizes) if is_product(&sizes) => {
            pointwise::<B, N>(layers, &sizes, x, weight.shape(), grad)
        }
        Some(sizes) if is_tall(sizes.outs, sizes.weights()) => {
            let channels = 4 * sizes.weights() - 1;
            in_parts::<B, N>(channels, [x, weight, grad], options, backward)
        }
        _ => backward(x, weight, grad, options),
    }
}

fn pointwise<B: Backend, const N: usize>(
    layers: &LayerSet,
    sizes: &Sizes<N>,
    x: FloatTensor<B>,
    weight: Shape,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    let (grad, x) = (rows::<B>(grad), sizes.read::<B>(x));
    let product = over_rows::<B>(layers, grad, x, sizes.images, None);
    B::float_reshape(product, weight)
}

/// The gradient of so many output channels after the other.
fn in_parts<B: Backend, const N: usize>(
    channels: usize,
    [x, weight, grad]: [FloatTensor<B>; 3],
    options: ConvOptions<N>,
    backward: Backward<B, N>,
) -> FloatTensor<B> {
    let outs = weight.shape()[0];
    let parts = (0..outs).step_by(channels).map(|first| {
        let part = first..outs.min(first + channels);
        let of = |tensor: &FloatTensor<B>, dim| {
            let mut slices = vec![Slice::full(); N + 2];
            slices[dim] = part.clone().into();
            B::float_slice(tensor.clone(), &slices)
        };
        backward(x.clone(), of(&weight, 0), of(&grad, 1), options.clone())
    });
    B::float_cat(parts.collect(), 0)
}
