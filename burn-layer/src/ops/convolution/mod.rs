//! Convolutions in 16 bits that are computed in another shape, for the reason that [products](super::product) are: CubeCL's autotune
//! tries them as products of all pixels, which are tall. Among the kernels that Burn's autotune tries (burn-cubecl 0.22.1) are
//!
//! - for the output of a convolution by 1 x 1, a product of `[pixels, ins]` by `[ins, outs]`;
//! - for the gradient of the input, `[pixels, outs]` by `[outs, taps * ins]`, and its transposition;
//! - for the gradient of the weight, `[outs, pixels]` by `[pixels, taps * ins]`, and, if an image has one pixel, its transposition.
//!
//! Convolutions in groups are not among them. Transposed convolutions are left as they are.
//!
//! Where a [library](crate::cublaslt) computes products, it computes all convolutions by 1 x 1: two thirds of a ResNet's. Another
//! [library](crate::cudnn) computes the rest, where it is installed, and those by 1 x 1 that skip pixels.
//!
//! Where patches are so large that TMA does not take their strides, convolutions are [products of patches](patches) in all dtypes.

mod forward;
mod library;
mod patches;
mod weight_backward;
mod x_backward;

pub(super) use forward::forward;
#[cfg(any(feature = "cubecl", test))]
pub(crate) use library::{Convolution, Convolutions, Wanted};
pub(super) use weight_backward::weight_backward;
pub(super) use x_backward::x_backward;

use super::{
    Multiply,
    product::{is_shaped, is_tall},
};
use crate::LayerSet;
use burn_backend::{
    Backend, Shape, Slice, TensorMetadata,
    ops::{ConvOptions, conv::calculate_conv_output_sizes},
    tensor::FloatTensor,
};

/// A backend's convolution: of an input, by a weight, with a bias.
type Convolve<B, const N: usize> =
    fn(FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>, ConvOptions<N>) -> FloatTensor<B>;

/// A backend's gradient of a convolution: of an input, by a weight, from the gradient of the output.
type Backward<B, const N: usize> =
    fn(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, ConvOptions<N>) -> FloatTensor<B>;

/// The sizes of a convolution of `N` dimensions.
struct Sizes<const N: usize> {
    images: usize,
    /// The channels of the input, and of the output.
    ins: usize,
    outs: usize,
    /// The spatial sizes of the input, the kernel and the output.
    input: [usize; N],
    kernel: [usize; N],
    output: [usize; N],
    options: ConvOptions<N>,
    /// Whether a library computes products of these tensors.
    by_library: bool,
}

impl<const N: usize> Sizes<N> {
    /// Those of the convolution of `x` by `weight`, if it may have to be computed in another shape.
    fn of<B: Backend>(
        layers: &LayerSet,
        x: &FloatTensor<B>,
        weight: &FloatTensor<B>,
        options: &ConvOptions<N>,
    ) -> Option<Self> {
        if options.groups != 1 || !layers.is_on_cuda() {
            return None;
        }
        let shaped = is_shaped::<B>(layers, x, weight);
        let sizes = Self {
            by_library: shaped && layers.mechanisms.get::<Multiply<B>>().is_some(),
            ..Self::new(&x.shape(), &weight.shape(), options)
        };
        // In f32, none is tried as a product whose tiles are too large.
        (shaped || sizes.has_large_patches()).then_some(sizes)
    }

    fn new(x: &Shape, weight: &Shape, options: &ConvOptions<N>) -> Self {
        let spatial = |shape: &Shape| core::array::from_fn(|dim| shape[dim + 2]);
        let (input, kernel) = (spatial(x), spatial(weight));
        let ConvOptions {
            stride,
            padding,
            dilation,
            ..
        } = options;
        let output = calculate_conv_output_sizes(&kernel, stride, padding, dilation, &input);
        Self {
            images: x[0],
            ins: x[1],
            outs: weight[0],
            input,
            kernel,
            output: output.try_into().expect("a size each"),
            options: options.clone(),
            by_library: false,
        }
    }

    /// The number of pixels of all outputs.
    fn pixels(&self) -> usize {
        self.images * self.output.iter().product::<usize>()
    }

    /// The number of weights of an output channel.
    fn weights(&self) -> usize {
        self.ins * self.kernel.iter().product::<usize>()
    }

    /// Whether every output pixel is computed of one input pixel.
    fn is_pointwise(&self) -> bool {
        let ConvOptions {
            padding, dilation, ..
        } = &self.options;
        self.kernel == [1; N] && *padding == [(0, 0); N] && *dilation == [1; N]
    }

    /// Whether the convolution is computed as a product of pixels: by a library always, otherwise if the backend would try a `tall` one.
    fn is_product(&self, tall: bool) -> bool {
        self.is_pointwise() && (self.by_library || tall)
    }

    fn is_strided(&self) -> bool {
        self.options.stride != [1; N]
    }

    /// The input pixels that a pointwise convolution reads.
    fn slices(&self) -> Vec<Slice> {
        let strides = self.options.stride.iter();
        let spatial = strides.map(|&stride| Slice::new(0, None, stride as isize));
        [Slice::full(); 2].into_iter().chain(spatial).collect()
    }

    /// The input pixels that a pointwise convolution reads, `[pixels, ins]`.
    fn read<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        rows::<B>(match self.is_strided() {
            true => B::float_slice(x, &self.slices()),
            false => x,
        })
    }
}

/// The pixels of images of shape `[images, channels, ..]`: `[pixels, channels]`. Burn computes convolutions with the channels last in
/// memory, so that this is a view of what one has returned.
fn rows<B: Backend>(images: FloatTensor<B>) -> FloatTensor<B> {
    let (shape, rank) = (images.shape(), images.shape().num_dims());
    let axes: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
    let pixels = shape.num_elements() / shape[1].max(1);
    B::float_reshape(
        B::float_permute(images, &axes),
        Shape::new([pixels, shape[1]]),
    )
}

/// Images of `[pixels, channels]`.
fn images<B: Backend>(rows: FloatTensor<B>, images: usize, spatial: &[usize]) -> FloatTensor<B> {
    let channels = rows.shape()[1];
    let shape = [&[images], spatial, &[channels]].concat();
    let last = shape.len() - 1;
    let axes: Vec<usize> = [0, last].into_iter().chain(1..last).collect();
    B::float_permute(B::float_reshape(rows, Shape::from(shape)), &axes)
}

/// The weight of a pointwise convolution, `[outs, ins]`.
fn matrix<B: Backend>(weight: FloatTensor<B>) -> FloatTensor<B> {
    let shape = weight.shape();
    B::float_reshape(weight, Shape::new([shape[0], shape[1]]))
}

#[cfg(test)]
mod tests;
