//! Functions on whole tensors, each on the device and without waiting for it.

mod amax;
mod scaled_matmul;

pub use amax::amax;
pub use scaled_matmul::{scaled_matmul, scaled_matmul_with_amax};

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::{Fp8Format, Fp8Ops, recipe::ScaleUpdate};

/// The scales of amaxes.
pub(crate) fn scales(amax: Tensor<1>, format: Fp8Format, power_of_two: bool) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::fp8_scales(
        amax.into_dispatch(),
        format,
        power_of_two,
    ))
}

/// See [`ScaleUpdate::apply`].
pub(crate) fn update_scale(
    history: Tensor<1>,
    scale: Tensor<1>,
    amax: Tensor<1>,
    update: ScaleUpdate,
) -> (Tensor<1>, Tensor<1>) {
    let (history, scale) = Dispatch::fp8_update_scale(
        history.into_dispatch(),
        scale.into_dispatch(),
        amax.into_dispatch(),
        update,
    );
    (Tensor::from_dispatch(history), Tensor::from_dispatch(scale))
}
