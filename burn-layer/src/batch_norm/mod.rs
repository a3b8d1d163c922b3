//! The kernels of batch normalizations, on CubeCL's devices.
//!
//! The mean and the variance of each channel are computed in one pass over the input, as convolutions leave it: with the channels last in
//! memory. A cube takes some channels of some pixels, and adds up their distances from the first pixel's, and the squares of these. What
//! the cubes of a channel have is put together by the formula of Chan, Golub and LeVeque (1979). Backward computes its two sums in one pass
//! as well.

mod fused;
mod kernels;

use burn_backend::{Backend, DType, TensorMetadata, ops::FloatTensorOps, tensor::FloatTensor};
use burn_cubecl::{
    Cube, CubeBackend, CubeDevice, kernel::untile, ops::permute, tensor::CubeTensor,
};
use core::any::Any;

use crate::{channels::sum_by_channel, ops::BatchNorms, rowwise::most};

/// How batch normalizations are computed, if the device is one of CubeCL's.
pub(crate) fn batch_norms_on<B: Backend>(device: &B::Device) -> Option<BatchNorms<B>> {
    let device = (device as &dyn Any).downcast_ref::<CubeDevice>()?;
    let batch_norms = BatchNorms::<Cube> {
        most: most(device),
        moments: Cube::channel_moments,
        sums: Cube::channel_sums,
    };
    (&batch_norms as &dyn Any).downcast_ref().copied()
}

/// A backend with these kernels.
trait NormalizesChannels: Backend {
    /// The mean and the variance of each channel of `[batch, channels, ..]`: `[1, channels, 1, ..]`, in f32.
    fn channel_moments(x: FloatTensor<Self>) -> [FloatTensor<Self>; 2];

    /// The sums by channel of `tensors[0]`, and of `tensors[0] (tensors[1] - center)`, in the same form.
    fn channel_sums(
        tensors: [FloatTensor<Self>; 2],
        center: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2];
}

impl NormalizesChannels for CubeBackend {
    fn channel_moments(x: CubeTensor) -> [CubeTensor; 2] {
        match pixels(&x) {
            Some(pixels) => kernels::moments(pixels),
            None => moments_as_it_lies(x),
        }
    }

    fn channel_sums([a, b]: [CubeTensor; 2], center: CubeTensor) -> [CubeTensor; 2] {
        match (pixels(&a), pixels(&b)) {
            (Some(a), Some(b)) => kernels::sums([a, b], center),
            _ => sums_as_they_lie([a, b], center),
        }
    }
}

/// The view `[batch, .., channels]`, if that is how the tensor lies in memory.
fn pixels(tensor: &CubeTensor) -> Option<CubeTensor> {
    let mut axes: Vec<usize> = (0..tensor.shape().num_dims()).collect();
    axes[1..].rotate_left(1);
    let pixels = permute(untile(tensor.clone()), &axes);
    pixels.is_contiguous().then_some(pixels)
}

/// The sums of tensors of which the channels of one are not last in memory, by Burn's kernels.
fn sums_as_they_lie([a, b]: [CubeTensor; 2], center: CubeTensor) -> [CubeTensor; 2] {
    let [a, b] = [a, b].map(|tensor| CubeBackend::float_cast(tensor, DType::F32.into()));
    let product = CubeBackend::float_mul(a.clone(), CubeBackend::float_sub(b, center));
    [a, product].map(|elements| sum_by_channel::<CubeBackend>(elements, 1.0))
}

/// The moments of a tensor whose channels are not last in memory, by Burn's kernels.
fn moments_as_it_lies(x: CubeTensor) -> [CubeTensor; 2] {
    let x = CubeBackend::float_cast(x, DType::F32.into());
    let samples = x.shape().num_elements() / x.shape()[1];
    let by = 1.0 / samples as f64;
    let mean = sum_by_channel::<CubeBackend>(x.clone(), by);
    let distance = CubeBackend::float_sub(x, mean.clone());
    let squares = CubeBackend::float_mul(distance.clone(), distance);
    [mean, sum_by_channel::<CubeBackend>(squares, by)]
}
