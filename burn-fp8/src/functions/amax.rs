use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::Fp8Ops;

/// The largest absolute value of a tensor, as an f32 tensor of shape `[1]`: NaN if there is a NaN, 0 for an empty tensor.
///
/// Not differentiable: the result carries no gradient.
///
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let x = Tensor::<2>::from_floats([[1.0, -3.0], [0.5, 2.0]], &Device::flex());
/// assert_eq!(burn_fp8::amax(x).into_scalar::<f32>(), 3.0);
/// ```
pub fn amax<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::fp8_amax(
        tensor.without_autodiff().into_dispatch(),
    ))
}
