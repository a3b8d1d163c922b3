//! The output of a convolution.

use super::{
    Convolve, Sizes, images, is_tall,
    library::{Wanted, by_library},
    matrix,
};
use crate::{LayerSet, ops::product::product};
use burn_backend::{Backend, Shape, TensorMetadata, ops::ConvOptions, tensor::FloatTensor};

/// The convolution, as a product if it is a tall one, a library's, or of large patches; otherwise by a library, if there is one.
pub(in crate::ops) fn forward<B: Backend, const N: usize>(
    layers: &LayerSet,
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    options: ConvOptions<N>,
    convolve: Convolve<B, N>,
) -> FloatTensor<B> {
    let sizes = Sizes::of::<B>(layers, &x, &weight, &options);
    let product = match sizes {
        Some(sizes) if sizes.has_large_patches() => {
            let product = sizes.of_patches::<B>(layers, x, weight);
            images::<B>(product, sizes.images, &sizes.output)
        }
        Some(sizes) if sizes.is_product(is_tall(sizes.pixels(), sizes.outs)) => {
            let weight = B::float_swap_dims(matrix::<B>(weight), 0, 1);
            let x = sizes.read::<B>(x);
            let product = product::<B>(layers, x, weight, false, |product| product);
            images::<B>(product, sizes.images, &sizes.output)
        }
        _ => {
            let shapes = [x.shape(), weight.shape()];
            let inputs = [&x, &weight];
            match by_library::<B, N>(layers, Wanted::Output, inputs, shapes, &options) {
                Some(output) => output,
                None => return convolve(x, weight, bias, options),
            }
        }
    };
    match bias {
        Some(bias) => {
            let mut row = [1; 5];
            row[1] = bias.shape()[0];
            B::float_add(product, B::float_reshape(bias, Shape::from(&row[..N + 2])))
        }
        None => product,
    }
}
