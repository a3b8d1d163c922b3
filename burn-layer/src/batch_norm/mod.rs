//! The kernels of batch normalizations, on CubeCL's devices.
//!
//! The mean and the variance of each channel are computed in one pass over the input, as convolutions leave it: with the channels last in
//! memory. A cube takes some channels of some pixels, and adds up their distances from the first pixel's, and the squares of these. What
//! the cubes of a channel have is put together by the formula of Chan, Golub and LeVeque (1979). Backward computes its two sums in one pass
//! as well.

mod fused;
mod kernels;

use burn_backend::{Backend, tensor::FloatTensor};
use burn_cubecl::{Cube, CubeBackend, CubeDevice, tensor::CubeTensor};
use core::any::Any;

use crate::{
    ops::BatchNorms,
    rowwise::{channels_last, most},
};

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
        kernels::moments(channels_last(x))
    }

    fn channel_sums(tensors: [CubeTensor; 2], center: CubeTensor) -> [CubeTensor; 2] {
        kernels::sums(tensors.map(channels_last), center)
    }
}
