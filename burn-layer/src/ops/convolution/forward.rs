//! The output of a convolution.

use super::{Convolve, Sizes, images, is_tall, matrix};
use crate::{LayerSet, ops::product::product};
use burn_backend::{Backend, Shape, TensorMetadata, ops::ConvOptions, tensor::FloatTensor};

/// The convolution, as a product if it is a tall one, a library's, or of large patches.
pub(in crate::ops) fn forward<B: Backend, const N: usize>(
    layers: &LayerSet,
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    options: ConvOptions<N>,
    convolve: Convolve<B, N>,
) -> FloatTensor<B> {
    let Some(sizes) = Sizes::of::<B>(layers, &x, &weight, &options) else {
        return convolve(x, weight, bias, options);
    };
    let product = if sizes.has_large_patches() {
        sizes.of_patches::<B>(layers, x, weight)
    } else if sizes.is_product(is_tall(sizes.pixels(), sizes.outs)) {
        let weight = B::float_swap_dims(matrix::<B>(weight), 0, 1);
        product::<B>(layers, sizes.read::<B>(x), weight, false, |product| product)
    } else {
        return convolve(x, weight, bias, options);
    };
    let product = match bias {
        Some(bias) => {
            let row = Shape::new([1, bias.shape()[0]]);
            B::float_add(product, B::float_reshape(bias, row))
        }
        None => product,
    };
    images::<B>(product, sizes.images, &sizes.output)
}
