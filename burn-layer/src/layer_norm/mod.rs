//! The kernels of layer and RMS normalizations, on CubeCL's devices.
//!
//! Burn's autodiff computes the gradient of a layer normalization by some twenty ops. Fused, these are still several passes over f32,
//! each of which writes what the next one reads. Here backward reads input and gradient once, and writes the gradient of the input;
//! where that is added to another gradient, as it is in a residual block, in the same kernel. All sums are in f32.

mod fused;
mod kernels;

use burn_backend::{Backend, DType, TensorMetadata, tensor::FloatTensor};
use burn_cubecl::{Cube, CubeBackend, CubeDevice, tensor::CubeTensor};
use core::any::Any;

use crate::{
    ops::{LayerNorms, NormBackward},
    rowwise::most,
};

/// How layer normalizations are computed, if the device is one of CubeCL's.
pub(crate) fn layer_norms_on<B: Backend>(device: &B::Device) -> Option<LayerNorms<B>> {
    let device = (device as &dyn Any).downcast_ref::<CubeDevice>()?;
    let layer_norms = LayerNorms::<Cube> {
        most: most(device),
        moments: Cube::moments,
        mean_squares: Cube::mean_squares,
        backward: Cube::norm_backward,
    };
    (&layer_norms as &dyn Any).downcast_ref().copied()
}

/// A backend with these kernels. A row is along the last dimension; a number of each row has a last dimension of 1, and is f32.
trait Normalizes: Backend {
    /// The mean and the variance of each row.
    fn moments(x: FloatTensor<Self>) -> [FloatTensor<Self>; 2];

    /// The mean of the squares of each row.
    fn mean_squares(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The gradient of a normalized tensor's input.
    fn norm_backward(backward: NormBackward<Self>) -> FloatTensor<Self>;
}

impl Normalizes for CubeBackend {
    fn moments(x: CubeTensor) -> [CubeTensor; 2] {
        kernels::moments(x)
    }

    fn mean_squares(x: CubeTensor) -> CubeTensor {
        kernels::mean_squares(x)
    }

    fn norm_backward(backward: NormBackward<Self>) -> CubeTensor {
        kernels::norm_backward(backward)
    }
}

/// The dtype of the gradient of `x`: its own, or that of what is added to it, if that is wider.
fn gradient_dtype<B: Backend>(x: &FloatTensor<B>, added: Option<&FloatTensor<B>>) -> DType {
    let added = added.map(|added| added.dtype());
    let wider = added.filter(|added| added.size() > x.dtype().size());
    wider.unwrap_or(x.dtype())
}
