//! Convolutions of patches that do not overlap, such as a vision transformer's first layer, as products of all patches.
//!
//! TMA takes strides of 8 at most. For larger ones, kernels that Burn's autotune tries fail, in any dtype, and with them all that is
//! computed of their tensors.

use super::{Sizes, rows};
use crate::{
    LayerSet,
    ops::{batch::over_rows, product::product},
};
use burn_backend::{Backend, Shape, Slice, TensorMetadata, tensor::FloatTensor};
use core::array::from_fn;

/// The largest stride that TMA takes.
const STRIDE: usize = 8;

impl<const N: usize> Sizes<N> {
    /// Whether the convolution is one of patches whose strides are too large for the backend.
    pub(super) fn has_large_patches(&self) -> bool {
        let options = &self.options;
        let patches = options.stride == self.kernel
            && options.padding == [(0, 0); N]
            && options.dilation == [1; N];
        patches && options.stride.iter().any(|&stride| stride > STRIDE)
    }

    /// The size of the input in whole patches.
    fn whole(&self) -> [usize; N] {
        from_fn(|dim| self.output[dim] * self.kernel[dim])
    }

    /// The input in whole patches.
    fn covered(&self) -> Vec<Slice> {
        let spatial = self.whole().into_iter().map(|size| Slice::from(0..size));
        [Slice::full(); 2].into_iter().chain(spatial).collect()
    }

    /// The patches of an input, `[pixels, weights]`.
    pub(super) fn patches<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let x = match self.whole() == self.input {
            true => x,
            false => B::float_slice(x, &self.covered()),
        };
        let spatial = (0..N).flat_map(|dim| [self.output[dim], self.kernel[dim]]);
        let split: Vec<usize> = [self.images, self.ins].into_iter().chain(spatial).collect();
        let pixels = (0..N).map(|dim| 2 + 2 * dim);
        let taps = (0..N).map(|dim| 3 + 2 * dim);
        let axes: Vec<usize> = [0]
            .into_iter()
            .chain(pixels)
            .chain([1])
            .chain(taps)
            .collect();
        let x = B::float_permute(B::float_reshape(x, Shape::from(split)), &axes);
        B::float_reshape(x, Shape::new([self.pixels(), self.weights()]))
    }

    /// The input of patches, with zeros where no patch is.
    fn unpatched<B: Backend>(&self, patches: FloatTensor<B>) -> FloatTensor<B> {
        let (device, dtype) = (patches.device(), patches.dtype());
        let split = [&[self.images][..], &self.output, &[self.ins], &self.kernel].concat();
        let spatial = (0..N).flat_map(|dim| [1 + dim, 2 + N + dim]);
        let axes: Vec<usize> = [0, 1 + N].into_iter().chain(spatial).collect();
        let x = B::float_permute(B::float_reshape(patches, Shape::from(split)), &axes);
        let of = |spatial: &[usize]| Shape::from([&[self.images, self.ins], spatial].concat());
        let x = B::float_reshape(x, of(&self.whole()));
        match self.whole() == self.input {
            true => x,
            false => {
                let zeros = B::float_zeros(of(&self.input), &device, dtype.into());
                B::float_slice_assign(zeros, &self.covered(), x)
            }
        }
    }

    /// The weight, `[outs, weights]`.
    fn weight_rows<B: Backend>(&self, weight: FloatTensor<B>) -> FloatTensor<B> {
        B::float_reshape(weight, Shape::new([self.outs, self.weights()]))
    }

    /// The output, `[pixels, outs]`, without a bias.
    pub(super) fn of_patches<B: Backend>(
        &self,
        layers: &LayerSet,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let weight = B::float_swap_dims(self.weight_rows::<B>(weight), 0, 1);
        product::<B>(layers, self.patches::<B>(x), weight, false, |product| {
            product
        })
    }

    /// The gradient of the input.
    pub(super) fn patches_backward<B: Backend>(
        &self,
        layers: &LayerSet,
        weight: FloatTensor<B>,
        grad: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (grad, weight) = (rows::<B>(grad), self.weight_rows::<B>(weight));
        let patches = product::<B>(layers, grad, weight, false, |product| product);
        self.unpatched::<B>(patches)
    }

    /// The gradient of the weight.
    pub(super) fn patch_weight_backward<B: Backend>(
        &self,
        layers: &LayerSet,
        x: FloatTensor<B>,
        weight: Shape,
        grad: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (grad, patches) = (rows::<B>(grad), self.patches::<B>(x));
        let product = over_rows::<B>(layers, grad, patches, self.images, None);
        B::float_reshape(product, weight)
    }
}
