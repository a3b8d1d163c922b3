//! The output of a convolution.

use super::{Convolve, Sizes, images, is_tall, matrix};
use crate::{LayerSet, ops::product::product};
use burn_backend::{Backend, Shape, TensorMetadata, ops::ConvOptions, tensor::FloatTensor};

/// The convolution, as a product if it is a tall one.
pub(in crate::ops) fn forward<B: Backend, const N: usize>(
    layers: &LayerSet,
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    options: ConvOptions<N>,
    convolve: Convolve<B, N>,
) -> FloatTensor<B> {
    let sizes = Sizes::of::<B>(layers, &x, &weight, &options);
    match sizes.filter(|sizes| sizes.is_pointwise() && is_tall(sizes.pixels(), sizes.outs)) {
        Some(sizes) => pointwise::<B, N>(layers, &sizes, x, weight, bias),
        None => convolve(x, weight, bias, options),
    }
}

fn pointwise<B: Backend, const N: usize>(
    layers: &LayerSet,
    sizes: &Sizes<N>,
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let weight = B::float_swap_dims(matrix::<B>(weight), 0, 1);
    let product = product::<B>(layers, sizes.read::<B>(x), weight, false, |product| product);
    let product = match bias {
        Some(bias) => {
            let row = Shape::new([1, bias.shape()[0]]);
            B::float_add(product, B::float_reshape(bias, row))
        }
        None => product,
    };
    images::<B>(product, sizes.images, &sizes.output)
}
