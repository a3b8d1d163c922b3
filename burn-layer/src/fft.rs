//! The FFTs of `burn::signal` on layered devices.

use burn_ir::{BackendIr, CustomOpIr, HandleContainer, ScalarIr};
use burn_router::CustomOpHandler;
use burn_signal::SignalOps;
use std::sync::Arc;

/// The FFTs of `burn::signal` (0.22.1) by name, run by the kernels of `B`. Devices made by [`Layers::on`](crate::Layers::on) have them.
/// Give them to [`Layers::custom_ops`](crate::Layers::custom_ops) for a device of another backend.
///
/// They run in the dtypes that the program sees, so in f32 on an autocast device.
///
/// ```
/// use burn::{signal::rfft, tensor::Tensor};
/// use burn_flex::{Flex, FlexDevice};
/// use burn_layer::{Layers, fft_ops};
///
/// let layers = Layers::over::<Flex>(FlexDevice).custom_ops::<Flex>(fft_ops::<Flex>());
/// let device = layers.serve()?;
/// let (real, _imaginary) = rfft(Tensor::<1>::ones([4], &device), 0, None);
/// assert_eq!(real.into_data().try_to_vec::<f32>().unwrap(), [4.0, 0.0, 0.0]);
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
pub fn fft_ops<B: BackendIr + SignalOps>() -> [(&'static str, CustomOpHandler<B>); 2] {
    [
        (
            "signal::rfft",
            Arc::new(|handles, ir, _| rfft::<B>(handles, ir)),
        ),
        (
            "signal::irfft",
            Arc::new(|handles, ir, _| irfft::<B>(handles, ir)),
        ),
    ]
}

fn rfft<B: BackendIr + SignalOps>(handles: &mut HandleContainer<B::Handle>, ir: &CustomOpIr) {
    let ([signal], [real_ir, imaginary_ir]) = ir.as_fixed();
    let (dim, length) = arguments(ir);
    let signal = handles.get_float_tensor::<B>(signal);
    let (real, imaginary) = B::rfft(signal, dim, length);
    handles.register_float_tensor::<B>(&real_ir.id, real);
    handles.register_float_tensor::<B>(&imaginary_ir.id, imaginary);
}

fn irfft<B: BackendIr + SignalOps>(handles: &mut HandleContainer<B::Handle>, ir: &CustomOpIr) {
    let ([real, imaginary], [output]) = ir.as_fixed();
    let (dim, length) = arguments(ir);
    let real = handles.get_float_tensor::<B>(real);
    let imaginary = handles.get_float_tensor::<B>(imaginary);
    let signal = B::irfft(real, imaginary, dim, length);
    handles.register_float_tensor::<B>(&output.id, signal);
}

/// The dimension, and the length if the program gave one.
fn arguments(ir: &CustomOpIr) -> (usize, Option<usize>) {
    let [
        ScalarIr::UInt(dim),
        ScalarIr::Bool(given),
        ScalarIr::UInt(length),
    ] = ir.scalars[..]
    else {
        panic!("not an FFT as Burn 0.22.1 describes it: {:?}", ir.scalars);
    };
    (dim as usize, given.then_some(length as usize))
}
