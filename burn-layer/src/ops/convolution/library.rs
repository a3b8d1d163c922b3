//! Convolutions in 16 bits by a [library](crate::cudnn).

use crate::{LayerSet, ops::product::is_shaped};
#[cfg(any(feature = "cubecl", test))]
use burn_backend::ops::conv;
use burn_backend::{Backend, DType, Shape, TensorMetadata, ops::ConvOptions, tensor::FloatTensor};

/// Which of the three tensors of a convolution is computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// From the input and the weight.
    Output,
    /// From the weight and the gradient of the output.
    InputGradient,
    /// From the input and the gradient of the output.
    WeightGradient,
}

/// A convolution of one to three dimensions, or one of its gradients.
#[derive(Clone, Debug)]
#[cfg_attr(
    not(any(feature = "cubecl", test)),
    expect(dead_code, reason = "a library reads it")
)]
pub(crate) struct Convolution {
    pub(crate) wanted: Wanted,
    /// Of all three tensors.
    pub(crate) dtype: DType,
    /// The shapes of the input and the weight.
    pub(crate) x: Shape,
    pub(crate) weight: Shape,
    /// Of each spatial dimension.
    pub(crate) stride: Vec<usize>,
    pub(crate) padding: Vec<(usize, usize)>,
    pub(crate) dilation: Vec<usize>,
    pub(crate) groups: usize,
}

impl Convolution {
    /// The shape of the tensor that is computed.
    #[cfg(any(feature = "cubecl", test))]
    pub(crate) fn shape(&self) -> Shape {
        match self.wanted {
            Wanted::Output => self.y(),
            Wanted::InputGradient => self.x.clone(),
            Wanted::WeightGradient => self.weight.clone(),
        }
    }

    /// The tensor that is wanted, by the backend's own kernels.
    #[cfg(any(feature = "cubecl", test))]
    pub(crate) fn by_backend<B: Backend>(self, inputs: [FloatTensor<B>; 2]) -> FloatTensor<B> {
        let shape = self.shape();
        let [a, b] = inputs;
        // Only its shape matters.
        let other = || B::float_empty(shape, &a.device(), self.dtype.into());
        macro_rules! by {
            ($forward:ident, $x_backward:ident, $weight_backward:ident) => {
                match self.wanted {
                    Wanted::Output => B::$forward(a, b, None, self.options()),
                    Wanted::InputGradient => B::$x_backward(other(), a, b, self.options()),
                    Wanted::WeightGradient => {
                        let weight = other();
                        B::$weight_backward(a, weight, b, self.options())
                    }
                }
            };
        }
        match self.stride.len() {
            1 => by!(conv1d, conv1d_x_backward, conv1d_weight_backward),
            2 => by!(conv2d, conv2d_x_backward, conv2d_weight_backward),
            _ => by!(conv3d, conv3d_x_backward, conv3d_weight_backward),
        }
    }

    #[cfg(any(feature = "cubecl", test))]
    fn options<const N: usize>(&self) -> ConvOptions<N> {
        let each = |values: &[usize]| core::array::from_fn(|dim| values[dim]);
        let padding = core::array::from_fn(|dim| self.padding[dim]);
        let (stride, dilation) = (each(&self.stride), each(&self.dilation));
        ConvOptions::new_with_padding(stride, padding, dilation, self.groups)
    }

    #[cfg(any(feature = "cubecl", test))]
    fn y(&self) -> Shape {
        let (kernel, input) = (&self.weight[2..], &self.x[2..]);
        let (stride, padding, dilation) = (&self.stride, &self.padding, &self.dilation);
        let sizes = conv::calculate_conv_output_sizes(kernel, stride, padding, dilation, input);
        Shape::from([&[self.x[0], self.weight[0]][..], &sizes].concat())
    }
}

/// How a library computes convolutions on a backend.
pub(crate) struct Convolutions<B: Backend> {
    /// Whether the library of that device computes such a convolution.
    pub(crate) can: fn(&Convolution, &B::Device) -> bool,
    /// The tensor that is wanted, from the other two in the order in which [`Wanted`] names them.
    pub(crate) compute: fn([FloatTensor<B>; 2], Convolution) -> FloatTensor<B>,
}

impl<B: Backend> Clone for Convolutions<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Convolutions<B> {}

/// The tensor that is wanted, from the other two, if there is a library that computes it.
pub(super) fn by_library<B: Backend, const N: usize>(
    layers: &LayerSet,
    wanted: Wanted,
    [a, b]: [&FloatTensor<B>; 2],
    [x, weight]: [Shape; 2],
    options: &ConvOptions<N>,
) -> Option<FloatTensor<B>> {
    let Convolutions::<B> { can, compute } = layers.mechanisms.get()?;
    if !is_shaped::<B>(layers, a, b) || a.dtype() != b.dtype() {
        return None;
    }
    let convolution = Convolution {
        wanted,
        dtype: a.dtype(),
        x,
        weight,
        stride: options.stride.to_vec(),
        padding: options.padding.to_vec(),
        dilation: options.dilation.to_vec(),
        groups: options.groups,
    };
    can(&convolution, &a.device()).then(|| compute([a.clone(), b.clone()], convolution))
}
