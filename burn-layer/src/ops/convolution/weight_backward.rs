//! The gradient of a convolution's weight.

use super::{Backward, Sizes, is_tall, rows};
use crate::{LayerSet, ops::batch::over_rows};
use burn_backend::{Backend, Slice, TensorMetadata, ops::ConvOptions, tensor::FloatTensor};

/// The gradient of the weight, as a product, or of some output channels after the other, if the backend would try a tall product.
pub(in crate::ops) fn weight_backward<B: Backend, const N: usize>(
    layers: &LayerSet,
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    grad: FloatTensor<B>,
    options: ConvOptions<N>,
    backward: Backward<B, N>,
) -> FloatTensor<B> {
    let Some(sizes) = Sizes::of::<B>(layers, &x, &weight, &options) else {
        return backward(x, weight, grad, options);
    };
    if sizes.has_large_patches() {
        return sizes.patch_weight_backward::<B>(layers, x, weight.shape(), grad);
    }
    let (outs, weights) = (sizes.outs, sizes.weights());
    let one_pixel = sizes.output.iter().product::<usize>() == 1;
    let tall = is_tall(outs, weights);
    if sizes.is_product(tall || one_pixel && is_tall(weights, outs)) {
        let (shape, images) = (weight.shape(), sizes.images);
        let (grad, x) = (rows::<B>(grad), sizes.read::<B>(x));
        let product = over_rows::<B>(layers, grad, x, images, None);
        return B::float_reshape(product, shape);
    }
    if !tall {
        return backward(x, weight, grad, options);
    }
    let channels = 4 * weights - 1;
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
