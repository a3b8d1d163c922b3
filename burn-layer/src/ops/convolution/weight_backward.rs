//! The gradient of a convolution's weight.

use super::{Backward, Sizes, is_tall, rows};
use crate::{LayerSet, ops::batch::parts, ops::product::product};
use burn_backend::{Backend, Shape, Slice, TensorMetadata, ops::ConvOptions, tensor::FloatTensor};

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
    let (outs, weights) = (sizes.outs, sizes.weights());
    let one_pixel = sizes.output.iter().product::<usize>() == 1;
    let tall = is_tall(outs, weights);
    match (tall || one_pixel && is_tall(weights, outs), tall) {
        (true, _) if sizes.is_pointwise() => {
            let product = pointwise::<B, N>(layers, &sizes, x, grad);
            B::float_reshape(product, weight.shape())
        }
        (_, true) => {
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
        _ => backward(x, weight, grad, options),
    }
}

/// `[outs, ins]`. The pixels are multiplied in parts, as many as keep a GPU busy, and these are summed.
fn pointwise<B: Backend, const N: usize>(
    layers: &LayerSet,
    sizes: &Sizes<N>,
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    let (ins, outs) = (sizes.ins, sizes.outs);
    let parts = parts(sizes.images, ins, outs);
    let cut = |rows, channels| {
        let pixels = sizes.pixels() / parts;
        B::float_reshape(rows, Shape::new([parts, pixels, channels]))
    };
    let grad = B::float_swap_dims(cut(rows::<B>(grad), outs), 1, 2);
    let products = product::<B>(layers, grad, cut(sizes.read::<B>(x), ins), true, |grad| {
        grad
    });
    let sum = match parts {
        1 => products,
        _ => B::float_sum_dim(products, 0),
    };
    B::float_reshape(sum, Shape::new([outs, ins]))
}
