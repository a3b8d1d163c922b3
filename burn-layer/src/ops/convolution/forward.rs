//! The output of a convolution.

use super::{
    Convolve, Sizes, images, is_tall,
    library::{Wanted, by_library},
    matrix,
};
use crate::{LayerSet, ops::product::product};
use burn_backend::{Backend, Shape, TensorMetadata, ops::ConvOptions, tensor::FloatTensor};

/// The convolution, as a product if it is a tall one, a library's, or of large patches; otherwise by a library, if there is one. So is one
/// that skips pixels, which would be copied for a product.
pub(in crate::ops) fn forward<B: Backend, const N: usize>(
    layers: &LayerSet,
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    options: ConvOptions<N>,
    convolve: Convolve<B, N>,
) -> FloatTensor<B> {
    let sizes = Sizes::of::<B>(layers, &x, &weight, &options);
    let by_library = || {
        let shapes = [x.shape(), weight.shape()];
        by_library::<B, N>(layers, Wanted::Output, [&x, &weight], shapes, &options)
    };
    let is_product = |sizes: &Sizes<N>| sizes.is_product(is_tall(sizes.pixels(), sizes.outs));
    let output = match sizes {
        Some(sizes) if sizes.has_large_patches() => {
            let product = sizes.of_patches::<B>(layers, x, weight);
            images::<B>(product, sizes.images, &sizes.output)
        }
        Some(sizes) if is_product(&sizes) && !sizes.is_strided() => {
            pointwise::<B, N>(layers, &sizes, x, weight)
        }
        sizes => match (by_library(), sizes.filter(is_product)) {
            (Some(output), _) => output,
            (None, Some(sizes)) => pointwise::<B, N>(layers, &sizes, x, weight),
            (None, None) => return convolve(x, weight, bias, options),
        },
    };
    match bias {
        Some(bias) => {
            let mut row = [1; 5];
            row[1] = bias.shape()[0];
            B::float_add(output, B::float_reshape(bias, Shape::from(&row[..N + 2])))
        }
        None => output,
    }
}

fn pointwise<B: Backend, const N: usize>(
    layers: &LayerSet,
    sizes: &Sizes<N>,
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
) -> FloatTensor<B> {
    let weight = B::float_swap_dims(matrix::<B>(weight), 0, 1);
    let x = sizes.read::<B>(x);
    let product = product::<B>(layers, x, weight, false, |product| product);
    images::<B>(product, sizes.images, &sizes.output)
}
