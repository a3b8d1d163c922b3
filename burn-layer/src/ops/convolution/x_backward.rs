//! The gradient of a convolution's input.

use super::{
    Backward, Convolve, Sizes, forward, images, is_tall,
    library::{Wanted, by_library},
    matrix, rows,
};
use crate::{LayerSet, ops::product::product};
use burn_backend::{Backend, Shape, Slice, TensorMetadata, ops::ConvOptions, tensor::FloatTensor};
use core::array::from_fn;

/// The gradient of the input, as a product if it is one by a library; otherwise by a library, if there is one, and without one as a
/// product or a convolution if the backend would try a tall product. A convolution that is both strided and dilated is left to the
/// backend then.
pub(in crate::ops) fn x_backward<B: Backend, const N: usize>(
    layers: &LayerSet,
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    grad: FloatTensor<B>,
    options: ConvOptions<N>,
    backward: Backward<B, N>,
    convolve: Convolve<B, N>,
) -> FloatTensor<B> {
    let sizes = Sizes::of::<B>(layers, &x, &weight, &options);
    if let Some(sizes) = sizes.as_ref().filter(|sizes| sizes.has_large_patches()) {
        return sizes.patches_backward::<B>(layers, weight, grad);
    }
    let tall = sizes.as_ref().is_some_and(|sizes| {
        let (pixels, weights) = (sizes.pixels(), sizes.weights());
        is_tall(pixels, weights) || is_tall(weights, pixels)
    });
    let product = sizes.as_ref().filter(|sizes| sizes.is_product(tall));
    if let Some(sizes) = product.filter(|sizes| !sizes.is_strided()) {
        return pointwise::<B, N>(layers, sizes, x, weight, grad);
    }
    let shapes = [x.shape(), weight.shape()];
    let inputs = [&weight, &grad];
    if let Some(grad) = by_library::<B, N>(layers, Wanted::InputGradient, inputs, shapes, &options)
    {
        return grad;
    }
    match sizes {
        Some(sizes) if sizes.is_product(tall) => pointwise::<B, N>(layers, &sizes, x, weight, grad),
        Some(sizes) if tall && (!sizes.is_strided() || options.dilation == [1; N]) => {
            Phases::new(&sizes).x_backward::<B>(layers, &sizes, weight, grad, convolve)
        }
        _ => backward(x, weight, grad, options),
    }
}

fn pointwise<B: Backend, const N: usize>(
    layers: &LayerSet,
    sizes: &Sizes<N>,
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    let product = product::<B>(
        layers,
        rows::<B>(grad),
        matrix::<B>(weight),
        false,
        |grad| grad,
    );
    let read = images::<B>(product, sizes.images, &sizes.output);
    match sizes.is_strided() {
        // The other pixels have no part in the output.
        true => {
            let zeros = B::float_zeros(x.shape(), &x.device(), x.dtype().into());
            B::float_slice_assign(zeros, &sizes.slices(), read)
        }
        false => read,
    }
}

/// The gradient of the input as one convolution of the gradient of the output.
///
/// Of `s` adjacent input pixels, where `s` is the stride, each has taps of the kernel of its own: every `s`th. So each is a convolution
/// of the gradient by these taps, in reverse order; and all are one convolution with `s` times the channels, between which its pixels
/// are distributed (as in <https://arxiv.org/abs/1609.07009>).
struct Phases<const N: usize> {
    stride: [usize; N],
    /// The number of taps of each phase.
    taps: [usize; N],
    padding: [(usize, usize); N],
    /// The number of pixels of a channel.
    output: [usize; N],
    /// The first pixel of the input among those that are computed.
    first: [usize; N],
}

impl<const N: usize> Phases<N> {
    fn new(sizes: &Sizes<N>) -> Self {
        let ConvOptions {
            stride,
            padding,
            dilation,
            ..
        } = sizes.options;
        let taps: [usize; N] = from_fn(|dim| sizes.kernel[dim].div_ceil(stride[dim]));
        // The padding is not computed, as far as strides of it can be left out.
        let reach: [usize; N] = from_fn(|dim| dilation[dim] * (taps[dim] - 1));
        let begin: [usize; N] = from_fn(|dim| padding[dim].0);
        let skipped: [usize; N] = from_fn(|dim| reach[dim].min(begin[dim] / stride[dim]));
        let all: [usize; N] = from_fn(|dim| (sizes.input[dim] + begin[dim]).div_ceil(stride[dim]));
        let after: [usize; N] = from_fn(|dim| all[dim].saturating_sub(sizes.output[dim]));
        Self {
            stride,
            taps,
            padding: from_fn(|dim| (reach[dim] - skipped[dim], after[dim])),
            output: from_fn(|dim| sizes.output[dim] + after[dim] - skipped[dim]),
            first: from_fn(|dim| begin[dim] - stride[dim] * skipped[dim]),
        }
    }

    fn x_backward<B: Backend>(
        &self,
        layers: &LayerSet,
        sizes: &Sizes<N>,
        weight: FloatTensor<B>,
        grad: FloatTensor<B>,
        convolve: Convolve<B, N>,
    ) -> FloatTensor<B> {
        let dilation = sizes.options.dilation;
        let options = ConvOptions::new_with_padding([1; N], self.padding, dilation, 1);
        let weight = self.weight::<B>(sizes, weight);
        let phases = forward::<B, N>(layers, grad, weight, None, options, convolve);
        let x = match sizes.is_strided() {
            true => self.interleaved::<B>(sizes, phases),
            false => phases,
        };
        let computed = x.shape();
        if computed[2..] == sizes.input {
            return x;
        }
        let slice = |(first, size): (&usize, &usize)| Slice::from(*first..first + size);
        let spatial = self.first.iter().zip(&sizes.input).map(slice);
        let slices: Vec<Slice> = [Slice::full(); 2].into_iter().chain(spatial).collect();
        B::float_slice(x, &slices)
    }

    /// The weight of the convolution, `[stride * ins, outs, taps]`.
    fn weight<B: Backend>(&self, sizes: &Sizes<N>, weight: FloatTensor<B>) -> FloatTensor<B> {
        let (stride, taps) = (&self.stride, &self.taps);
        let weight = self.filled::<B>(sizes, weight);
        let split = (0..N).flat_map(|dim| [taps[dim], stride[dim]]);
        let split: Vec<usize> = [sizes.outs, sizes.ins].into_iter().chain(split).collect();
        let phase = (0..N).map(|dim| 3 + 2 * dim);
        let tap = (0..N).map(|dim| 2 + 2 * dim);
        let axes: Vec<usize> = phase.chain([1, 0]).chain(tap).collect();
        let channels = stride.iter().product::<usize>() * sizes.ins;
        let shape = [&[channels, sizes.outs][..], taps].concat();
        let weight = B::float_permute(B::float_reshape(weight, Shape::from(split)), &axes);
        let spatial: Vec<usize> = (2..N + 2).collect();
        B::float_flip(B::float_reshape(weight, Shape::from(shape)), &spatial)
    }

    /// The weight with as many taps for each phase, of which the last are zeros.
    fn filled<B: Backend>(&self, sizes: &Sizes<N>, weight: FloatTensor<B>) -> FloatTensor<B> {
        let full: [usize; N] = from_fn(|dim| self.taps[dim] * self.stride[dim]);
        if full == sizes.kernel {
            return weight;
        }
        let shape = [&[sizes.outs, sizes.ins][..], &full].concat();
        let zeros = B::float_zeros(Shape::from(shape), &weight.device(), weight.dtype().into());
        let slices: Vec<Slice> = weight
            .shape()
            .iter()
            .map(|&size| (0..size).into())
            .collect();
        B::float_slice_assign(zeros, &slices, weight)
    }

    /// The pixels of `[images, stride * ins, ..]` in their places, with the channels last in memory.
    fn interleaved<B: Backend>(&self, sizes: &Sizes<N>, phases: FloatTensor<B>) -> FloatTensor<B> {
        let (count, ins) = (sizes.images, sizes.ins);
        let split = [&[count][..], &self.output, &self.stride, &[ins]].concat();
        let pixels = (0..N).flat_map(|dim| [1 + dim, 1 + N + dim]);
        let axes: Vec<usize> = [0].into_iter().chain(pixels).chain([1 + 2 * N]).collect();
        let x = B::float_reshape(rows::<B>(phases), Shape::from(split));
        let size: [usize; N] = from_fn(|dim| self.output[dim] * self.stride[dim]);
        let pixels = count * size.iter().product::<usize>();
        let x = B::float_reshape(B::float_permute(x, &axes), Shape::new([pixels, ins]));
        images::<B>(x, count, &size)
    }
}
