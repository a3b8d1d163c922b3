//! Functions on whole tensors. They run on the device, and do not wait for it.

mod amax;
mod scaled_matmul;

pub use amax::amax;
pub use scaled_matmul::{scaled_matmul, scaled_matmul_with_amax};

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::{Fp8Error, Fp8Format, Fp8Ops, Fp8Tensor, Granularity, MatmulSpec, recipe::ScaleUpdate};

/// Refuses a dtype that a CubeCL device of this process does not support. Remote devices are not asked, because that would wait
/// for them.
pub(crate) fn check_dtype(device: &Device, dtype: FloatDType) -> Result<(), Fp8Error> {
    #[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
    if let burn_dispatch::DispatchDevice::Cube(_) = device.as_dispatch()
        && !device.supports_dtype(dtype)
    {
        let mut supported = vec![FloatDType::F32, FloatDType::BF16, FloatDType::F16];
        supported.retain(|dtype| device.supports_dtype(*dtype));
        return Err(Fp8Error::UnsupportedDType {
            device: format!("{device:?}"),
            dtype: format!("{dtype:?}"),
            supported: supported.iter().map(|it| format!("{it:?}")).collect(),
        });
    }
    let _ = (device, dtype);
    Ok(())
}

/// Refuses a product that is too large for the kernels of a CubeCL device of this process.
pub(crate) fn check_product<const D: usize>(
    lhs: &Fp8Tensor<D>,
    rhs: &Fp8Tensor<D>,
    spec: MatmulSpec,
) -> Result<(), Fp8Error> {
    #[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
    if let burn_dispatch::DispatchDevice::Cube(device) = lhs.device().as_dispatch() {
        let shapes = [lhs.dims(), rhs.dims()].map(burn::tensor::Shape::from);
        return crate::kernels::check_product(device, shapes, spec);
    }
    let _ = (lhs, rhs, spec);
    Ok(())
}

/// Refuses a cast that is too large for the kernels of a CubeCL device of this process.
pub(crate) fn check_cast<const D: usize>(
    tensor: &Tensor<D>,
    granularity: Granularity,
) -> Result<(), Fp8Error> {
    #[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
    if let burn_dispatch::DispatchDevice::Cube(_) = tensor.device().without_autodiff().as_dispatch()
    {
        return crate::kernels::check_cast(&tensor.shape(), tensor.dtype(), granularity);
    }
    let _ = (tensor, granularity);
    Ok(())
}

/// Refuses anything but a single f32, because kernels would read other bits as f32. Length and dtype are known without waiting
/// for the device.
#[track_caller]
pub(crate) fn assert_scalar(caller: &str, name: &str, tensor: &Tensor<1>) {
    let ([length], dtype) = (tensor.dims(), tensor.dtype());
    assert!(
        length == 1 && dtype == DType::F32,
        "{caller}: the {name} must be one F32, but is {length} x {dtype:?}; cast it, or take one element"
    );
}

/// The scale for each amax.
pub(crate) fn scales(amax: Tensor<1>, format: Fp8Format, power_of_two: bool) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::fp8_scales(
        amax.into_dispatch(),
        format,
        power_of_two,
    ))
}

/// See [`ScaleUpdate::apply`].
#[track_caller]
pub(crate) fn update_scale(
    history: Tensor<1>,
    scale: Tensor<1>,
    amax: Tensor<1>,
    update: ScaleUpdate,
) -> (Tensor<1>, Tensor<1>) {
    assert_scalar("ScaleUpdate::apply", "scale", &scale);
    assert_scalar("ScaleUpdate::apply", "amax", &amax);
    let ([length], dtype) = (history.dims(), history.dtype());
    assert!(
        length > 0 && dtype == DType::F32,
        "ScaleUpdate::apply: the history must have one F32 or more, but is {length} x {dtype:?}"
    );
    let (history, scale) = Dispatch::fp8_update_scale(
        history.into_dispatch(),
        scale.into_dispatch(),
        amax.into_dispatch(),
        update,
    );
    (Tensor::from_dispatch(history), Tensor::from_dispatch(scale))
}
