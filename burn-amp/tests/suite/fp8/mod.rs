//! Linear layers of unmodified models in fp8, against the casts and products of burn-fp8 by hand.

mod by_hand;
mod left_out;

use burn::{
    module::Param,
    nn::{Linear, LinearConfig},
    tensor::{DType, Device, Tensor, TensorData},
};
use burn_amp::{
    Autocast, AutocastLease, Fp8Error, Fp8Filter, Layers,
    recipe::{
        BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RecipeFormat, RowwiseScaling,
    },
    with_fp8_ops,
};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Linear, Fp8Tensor, Granularity};

use super::devices::wgpu;

pub(super) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Numbers of all sizes, the same on every device.
pub(super) fn wave<const D: usize>(shape: [usize; D], step: f32, device: &Device) -> Tensor<D> {
    let number = |place: usize| (place as f32 * step).sin() * (place % 7 + 1) as f32;
    let numbers = (0..shape.iter().product()).map(number).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

pub(super) fn linear(size: [usize; 2], device: &Device) -> Linear {
    let mut linear = LinearConfig::new(size[0], size[1]).init(device);
    let param = |tensor: Tensor<2>| tensor.set_require_grad(device.is_autodiff());
    linear.weight = Param::from_tensor(param(wave(size, 0.71, device)));
    let bias = wave([size[1]], 0.3, device).set_require_grad(device.is_autodiff());
    linear.bias = Some(Param::from_tensor(bias));
    linear
}

pub(super) fn fp8(recipe: impl Into<Fp8Recipe>, device: Device) -> AutocastLease {
    Autocast::fp8(recipe).unwrap().lease(device).unwrap()
}

/// The square of the distance, as a part of the square of what is expected.
pub(super) fn noise(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |value: f32| f64::from(value) * f64::from(value);
    let noise: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    noise / expected.iter().map(|b| square(*b)).sum::<f64>()
}

/// What the program sees, and what is stored: the output low, the gradient of a weight in full.
#[test]
fn the_program_sees_f32() {
    let device = fp8(CurrentScaling::new(), Device::flex());
    let linear = linear([16, 16], &device.device().autodiff());
    let x = wave([2, 16], 0.1, &device.device().autodiff());
    let output = linear.forward(x);
    assert_eq!(output.dtype(), DType::F32);
    assert_eq!(output.to_data().dtype(), DType::F32);
    let gradients = (output * 1e-3).sum().backward();
    let gradient = linear.weight.grad(&gradients).unwrap();
    assert_eq!(gradient.dtype(), DType::F32);
    let stored = device.report().low_bytes;
    // The output, twice (it is multiplied); of the gradients none of the weight's.
    assert!(stored > 0 && stored < 2 * 16 * 16 * 2, "{stored}");
    let row = linear.forward(wave([16], 0.2, &device.device().autodiff()));
    assert_eq!(row.dims(), [16]);
    let empty = linear.forward(Tensor::<2>::zeros([0, 16], &device.device().autodiff()));
    assert_eq!(empty.dims(), [0, 16]);
}

/// All three products of a layer, whatever the shape of its input is.
#[test]
fn inputs_of_more_dimensions() {
    let device = fp8(CurrentScaling::new(), Device::flex());
    let on = device.device().autodiff();
    for shape in [
        [1, 2, 32, 16],
        [2, 1, 5, 16],
        [2, 3, 32, 16],
        [1, 1, 32, 16],
        [1, 1, 5, 16],
    ] {
        let before = device.report().fp8_runs();
        let linear = linear([16, 16], &on);
        let x = wave(shape, 0.4, &on).require_grad();
        let gradients = linear.forward(x.clone()).sum().backward();
        values(x.grad(&gradients).unwrap());
        values(linear.weight.grad(&gradients).unwrap());
        device.device().sync().unwrap();
        assert_eq!(device.report().fp8_runs() - before, 3, "{shape:?}");
    }
}

/// Fp8 saturates, and with it an overflow of 16 bits before a layer: what a loss scaler must not rely on.
#[test]
fn an_infinite_gradient_leaves_a_layer_finite_and_nan_does_not() {
    let device = fp8(CurrentScaling::new(), Device::flex());
    let on = device.device().autodiff();
    for (value, finite) in [(f32::INFINITY, true), (f32::NAN, false)] {
        let linear = linear([16, 16], &on);
        let x = wave([4, 16], 0.4, &on).require_grad();
        let mut gradient = vec![1e-3; 4 * 16];
        gradient[5] = value;
        let gradient = Tensor::<2>::from_data(TensorData::new(gradient, [4, 16]), &on);
        let gradients = (linear.forward(x.clone()) * gradient).sum().backward();
        for gradient in [x.grad(&gradients), linear.weight.grad(&gradients)] {
            let all = values(gradient.unwrap()).iter().all(|x| x.is_finite());
            assert_eq!(all, finite, "{value}");
        }
        // The gradient of the bias is in high precision.
        let bias = linear.bias.as_ref().unwrap().grad(&gradients).unwrap();
        assert!(!values(bias)[5].is_finite());
    }
}

#[test]
fn devices_of_other_settings_are_others() {
    let device = |autocast: Autocast| autocast.device(Device::flex()).unwrap();
    let current = || Autocast::fp8(CurrentScaling::new()).unwrap();
    assert_eq!(device(current()), device(current()));
    assert_ne!(device(current()), device(Autocast::bf16()));
    assert_ne!(
        device(current()),
        device(Autocast::fp8(RowwiseScaling::new()).unwrap())
    );
    let other = current().fp8_filter(Fp8Filter::new().multiple_of(8));
    assert_ne!(device(current()), device(other));
}

#[test]
fn a_bad_recipe_is_an_error() {
    let recipe = CurrentScaling::new().with_format(RecipeFormat::E5M2);
    let error = Autocast::fp8(recipe).unwrap_err();
    assert!(matches!(error, Fp8Error::ForwardFormat { .. }), "{error}");
}

/// burn-fp8's own modules and tensors run on every autocast device, and on others that are told to.
#[test]
fn fp8_modules_run_on_layered_devices() {
    let flex = Device::flex;
    let on = |autocast: Autocast, plain: Device| (autocast.device(plain.clone()).unwrap(), plain);
    let mut devices = vec![
        on(Autocast::bf16(), flex()),
        on(Autocast::fp8(CurrentScaling::new()).unwrap(), flex()),
    ];
    devices.push((with_fp8_ops(Layers::on(flex())).serve().unwrap(), flex()));
    devices.extend(wgpu().map(|plain| on(Autocast::fp16(), plain)));
    let recipes: [Fp8Recipe; 3] = [
        DelayedScaling::new().into(),
        RowwiseScaling::new().into(),
        BlockScaling::new().with_size(4).into(),
    ];
    for ((device, plain), recipe) in devices.iter().flat_map(|on| recipes.map(|it| (on, it))) {
        let run = |device: &Device| {
            let layer = Fp8Linear::from_linear(linear([16, 8], device), recipe).unwrap();
            let x = wave([4, 16], 0.6, device);
            let gradients = layer.forward(x.clone()).sum().backward();
            let rows = Fp8Cast::new(Granularity::Row, Fp8Format::E4M3);
            let codes = Fp8Tensor::quantize_as(x, rows).unwrap().into_data();
            (values(layer.weight.grad(&gradients).unwrap()), codes)
        };
        let [layered, plain] = [device, plain].map(|device| device.clone().autodiff());
        assert_eq!(run(&layered), run(&plain), "{recipe:?}");
    }
}
