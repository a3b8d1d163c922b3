//! The kernels of softmaxes, and of losses over many classes, on CubeCL's devices.
//!
//! Burn's autodiff computes a softmax by five ops and its gradient by a dozen. Fused, these are still several passes, mostly over f32,
//! each of which writes what the next one reads. Here forward reads its input once, for the softmax and the statistics of each row, and
//! backward reads input and gradient once and writes the gradient of the input, in the input's dtype. All sums are in f32.

mod fused;
mod kernels;
mod logits;

use burn_backend::{
    Backend, DType,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::{Cube, CubeBackend, CubeDevice, tensor::CubeTensor};
use core::any::Any;

use crate::{
    ops::{Logits, SoftmaxBackward, Softmaxes},
    rowwise::most,
};

/// How softmaxes are computed, if the device is one of CubeCL's.
pub(crate) fn softmaxes_on<B: Backend>(device: &B::Device) -> Option<Softmaxes<B>> {
    let device = (device as &dyn Any).downcast_ref::<CubeDevice>()?;
    let softmaxes = Softmaxes::<Cube> {
        most: most(device),
        statistics: Cube::statistics,
        softmax: Cube::whole_softmax,
        forward: Cube::softmax_forward,
        backward: Cube::softmax_backward,
        gathered_backward: Cube::gathered_backward,
    };
    (&softmaxes as &dyn Any).downcast_ref().copied()
}

/// A backend with these kernels. A row is along the last dimension; a number of each row has a last dimension of 1, and is f32.
trait Rowwise: Backend {
    /// The maximum of each row, and the sum of `exp(x - maximum)`.
    fn statistics(of: Logits<Self>) -> [FloatTensor<Self>; 2];

    /// Both, and the softmax in that dtype.
    fn whole_softmax(of: Logits<Self>, dtype: DType) -> [FloatTensor<Self>; 3];

    /// `exp(x - maximum) / sum`, in that dtype.
    fn softmax_forward(
        of: Logits<Self>,
        statistics: [FloatTensor<Self>; 2],
        dtype: DType,
    ) -> FloatTensor<Self>;

    /// The gradient of `x`, in its dtype, from the gradient of its softmax: `y (dy - sum(y dy))`.
    fn softmax_backward(backward: SoftmaxBackward<Self>) -> FloatTensor<Self>;

    /// `exp(x - maximum) factor`, plus `gradient` at one index of each row, in the dtype of `x`. Takes `x`, the maxima and the factors.
    /// Indices are i32.
    fn gathered_backward(
        of: [FloatTensor<Self>; 3],
        indices: IntTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl Rowwise for CubeBackend {
    fn statistics(of: Logits<Self>) -> [CubeTensor; 2] {
        kernels::statistics(of)
    }

    fn whole_softmax(of: Logits<Self>, dtype: DType) -> [CubeTensor; 3] {
        kernels::whole_softmax(of, dtype)
    }

    fn softmax_forward(of: Logits<Self>, statistics: [CubeTensor; 2], dtype: DType) -> CubeTensor {
        kernels::softmax_forward(of, statistics, dtype)
    }

    fn softmax_backward(backward: SoftmaxBackward<Self>) -> CubeTensor {
        kernels::softmax_backward(backward)
    }

    fn gathered_backward(
        of: [CubeTensor; 3],
        indices: CubeTensor,
        gradient: CubeTensor,
    ) -> CubeTensor {
        kernels::gathered_backward(of, indices, gradient)
    }
}
