//! Linear layers of unmodified models in fp8, against the casts and products of burn-fp8 by hand.

use burn::{
    module::Param,
    nn::{Linear, LinearConfig},
    tensor::{DType, Device, FloatDType, Tensor, TensorData},
};
use burn_amp::{
    Autocast, AutocastLease, Fp8Error, Fp8Filter, Layers, OpCount, Policy, autocast,
    full_precision, named,
    recipe::{
        BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, LinearCasts, RecipeFormat,
        RowwiseScaling,
    },
    with_fp8_ops,
};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Linear, Fp8Tensor, Granularity, scaled_matmul};

use super::devices::{cube_devices, wgpu};

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

fn rows(tensor: &Tensor<3>) -> Tensor<2> {
    tensor.clone().flatten(0, 1)
}

/// The square of the distance, as a part of the square of what is expected.
pub(super) fn noise(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |value: f32| f64::from(value) * f64::from(value);
    let noise: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    noise / expected.iter().map(|b| square(*b)).sum::<f64>()
}

/// Output, gradients of input and weight.
type Pass = [Vec<f32>; 3];

fn pass(device: &Device, x: &Tensor<3>, gradient: &Tensor<3>) -> Pass {
    let device = device.clone().autodiff();
    let on = |tensor: &Tensor<3>| Tensor::<3>::from_data(tensor.clone().into_data(), &device);
    let (x, gradient) = (on(x).require_grad(), on(gradient));
    let mut linear = linear([32, 16], &device);
    // Burn may add it apart, when the output is rounded already.
    linear.bias = None;
    let output = linear.forward(x.clone());
    let gradients = (output.clone() * gradient).sum().backward();
    [
        values(output),
        values(x.grad(&gradients).unwrap()),
        values(linear.weight.grad(&gradients).unwrap()),
    ]
}

/// The same by burn-fp8. The gradient of the weight is the sum of those of as many batches as are cast for themselves.
fn by_hand(
    recipe: &Fp8Recipe,
    plain: &Device,
    [x, gradient]: [&Tensor<3>; 2],
    batches: usize,
    low: FloatDType,
) -> Pass {
    let weight = linear([32, 16], plain).weight.val();
    let (x, gradient) = (rows(x), rows(gradient));
    let format = recipe.format();
    let cast = |tensor: &Tensor<2>, granularity, format: Fp8Format| {
        let cast = Fp8Cast::new(granularity, format).with_power_of_two(recipe.power_of_two());
        Fp8Tensor::quantize_as(tensor.clone(), cast).unwrap()
    };
    let forward = |tensor: &Tensor<2>, granularity| cast(tensor, granularity, format.forward());
    let backward = |tensor: &Tensor<2>, granularity| cast(tensor, granularity, format.gradient());
    let LinearCasts {
        output: [input, right],
        input_gradient: [left, turned],
        weight_gradient: [turned_input, other],
    } = recipe.casts();
    let multiply = |a: Fp8Tensor<2>, b: Fp8Tensor<2>, dtype| {
        let product = scaled_matmul(&a, &b, None, dtype).unwrap();
        values(product.cast(FloatDType::F32))
    };
    let full = FloatDType::F32;
    let parts = x
        .clone()
        .chunk(batches, 0)
        .into_iter()
        .zip(gradient.clone().chunk(batches, 0));
    let parts = parts.map(|(x, gradient)| {
        multiply(
            forward(&x, turned_input).transpose(),
            backward(&gradient, other),
            full,
        )
    });
    let sum = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(b).map(|(a, b)| a + b).collect();
    [
        multiply(forward(&x, input), forward(&weight, right), low),
        multiply(
            backward(&gradient, left),
            forward(&weight, turned).transpose(),
            // The input was stored in f32, and so is its gradient.
            full,
        ),
        parts.reduce(sum).unwrap(),
    ]
}

/// Whether a device is a processor that rounds to bf16. Where the processor has no instruction for it, Burn's cast gives zeros on
/// CubeCL's CPU runtime.
fn is_processor_with_bf16(plain: &Device) -> bool {
    let processors = [
        Device::flex(),
        #[cfg(feature = "cpu")]
        Device::cpu(),
    ];
    let rounded = |x: Tensor<1>| x.cast(FloatDType::BF16).cast(FloatDType::F32);
    processors.contains(plain) && values(rounded(Tensor::from_floats([1.5], plain))) == [1.5]
}

#[test]
fn the_three_products_are_those_of_the_casts() {
    for plain in [Device::flex()].into_iter().chain(cube_devices()) {
        let recipes: [Fp8Recipe; 5] = [
            CurrentScaling::new().into(),
            CurrentScaling::new().with_format(RecipeFormat::E4M3).into(),
            RowwiseScaling::new().into(),
            BlockScaling::new().with_size(16).into(),
            // At first as current scaling.
            DelayedScaling::new().into(),
        ];
        // Rows, blocks and batches need bf16 of the device's own.
        let whole = |recipe: &Fp8Recipe| recipe.casts() == LinearCasts::TENSOR;
        let all = is_processor_with_bf16(&plain);
        // WebGPU has no bf16.
        let (policy, low, size) = match plain.supports_dtype(DType::BF16) {
            true => (Policy::bf16(), FloatDType::BF16, 1e-6),
            false => (Policy::fp16(), FloatDType::F16, 1e-2),
        };
        for recipe in recipes.into_iter().filter(|recipe| all || whole(recipe)) {
            // Burn multiplies the first as one matrix, and the second as a batch.
            let shapes = [[3, 5], [2, 32]];
            for [batch, length] in shapes.into_iter().take(if all { 2 } else { 1 }) {
                let autocast = Autocast::fp8(recipe).unwrap().rest(policy.clone());
                let device = autocast.lease(plain.clone()).unwrap();
                let x = wave([batch, length, 32], 0.37, &plain);
                let gradient = wave([batch, length, 16], 0.53, &plain) * size;
                let found = pass(&device.device(), &x, &gradient);
                let parts = if length == 32 && !whole(&recipe) {
                    batch
                } else {
                    1
                };
                let expected = by_hand(&recipe, &plain, [&x, &gradient], parts, low);
                let noise = |product: usize| noise(&found[product], &expected[product]);
                // Sums of the same terms in another order, and rounded to 16 bits where the output is.
                assert!(noise(0) < 1e-6, "output, {recipe:?}: {}", noise(0));
                assert!(
                    noise(1) < 1e-10,
                    "input's gradient, {recipe:?}: {}",
                    noise(1)
                );
                let weight = noise(2);
                assert!(weight < 1e-10, "weight's gradient, {recipe:?}: {weight}");
                let report = device.report();
                assert_eq!(report.fp8_runs(), 3, "{report}");
                let runs = |count: &OpCount| {
                    assert_eq!(report.fp8_runs_of(count.op), count.fp8_runs());
                    count.fp8_runs()
                };
                assert_eq!(report.ops.iter().map(runs).sum::<u64>(), 3);
                assert!(report.to_string().contains("fp8"));
            }
        }
    }
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

#[test]
fn a_filter_keeps_layers_out_forward_and_backward() {
    let run = |filter: Fp8Filter, size: [usize; 2], name: &str| {
        let autocast = Autocast::fp8(CurrentScaling::new())
            .unwrap()
            .fp8_filter(filter);
        let device = autocast.lease(Device::flex()).unwrap();
        let on = device.device().autodiff();
        let linear = linear(size, &on);
        let x = wave([4, size[0]], 0.4, &on).require_grad();
        let output = named("model", || named(name, || linear.forward(x)));
        let gradients = output.sum().backward();
        values(linear.weight.grad(&gradients).unwrap());
        device.device().sync().unwrap();
        let runs = device.report().fp8_runs();
        assert!(runs == 0 || runs == 3, "{runs}");
        runs == 3
    };
    let all = Fp8Filter::new();
    assert!(run(all.clone(), [32, 16], "hidden"));
    assert!(!run(all.clone(), [32, 10], "head"));
    assert!(!run(all.clone(), [24, 16], "hidden"));
    assert!(run(all.clone().multiple_of(2), [32, 10], "head"));
    assert!(!run(all.clone().min_size([33, 1]), [32, 16], "hidden"));
    assert!(!run(all.clone().min_size([1, 17]), [32, 16], "hidden"));
    assert!(!run(all.clone().except_up_to([32, 16]), [32, 16], "hidden"));
    assert!(run(all.clone().except_up_to([31, 99]), [32, 16], "hidden"));
    assert!(run(all.clone().except_up_to([99, 15]), [32, 16], "hidden"));
    assert!(!run(all.clone().except_size([32, 16]), [32, 16], "hidden"));
    assert!(run(all.clone().except_size([16, 32]), [32, 16], "hidden"));
    assert!(!run(all.clone().except_name("model"), [32, 16], "hidden"));
    assert!(!run(all.clone().except_name("hidden"), [32, 16], "hidden"));
    assert!(run(all.clone().except_name("head"), [32, 16], "hidden"));

    let filter = all
        .min_size([2, 3])
        .except_up_to([4, 4])
        .except_size([4, 5]);
    let filter = filter.except_name("head");
    let written = serde_json::to_string(&filter).unwrap();
    assert_eq!(serde_json::from_str::<Fp8Filter>(&written).unwrap(), filter);
    assert!(filter.takes([16, 16], ["body"]) && !filter.takes([16, 16], ["body", "head"]));
}

#[test]
fn a_multiple_of_nothing_is_not_read() {
    let written = serde_json::to_string(&Fp8Filter::new()).unwrap();
    let zero = written.replace("\"multiple_of\":16", "\"multiple_of\":0");
    assert_ne!(zero, written);
    assert!(serde_json::from_str::<Fp8Filter>(&zero).is_err());
}

#[test]
#[should_panic(expected = "multiple of 0")]
fn a_multiple_of_nothing_is_refused() {
    let _ = Fp8Filter::new().multiple_of(0);
}

/// Regions decide for what they hold, its backward too; 64-bit floats are left alone.
#[test]
fn regions_and_wide_floats_are_not_in_fp8() {
    let device = fp8(CurrentScaling::new(), Device::flex());
    let on = device.device().autodiff();
    let run = || {
        let (linear, x) = (linear([16, 16], &on), wave([2, 3, 16], 0.4, &on));
        let gradients = linear.forward(x.require_grad()).sum().backward();
        values(linear.weight.grad(&gradients).unwrap());
    };
    full_precision(run);
    autocast(&Policy::bf16(), run);
    assert_eq!(device.report().fp8_runs(), 0);
    let wide = wave([4, 16], 0.4, &device.device()).cast(DType::F64);
    let weight = wave([16, 16], 0.7, &device.device()).cast(DType::F64);
    burn::tensor::module::linear(wide, weight, None).into_data();
    assert_eq!(device.report().fp8_runs(), 0);
    // Nor is the product by a batch.
    let scores = wave([2, 16, 16], 0.1, &device.device());
    scores.clone().matmul(scores.transpose()).into_data();
    assert_eq!(device.report().fp8_runs(), 0);
    // Nor are the products of a matrix by itself, as in Muon's Newton-Schulz.
    let matrix = wave([16, 16], 0.1, &device.device());
    matrix
        .clone()
        .matmul(matrix.clone().transpose())
        .into_data();
    matrix
        .clone()
        .transpose()
        .matmul(matrix.clone())
        .into_data();
    matrix.clone().matmul(matrix).into_data();
    assert_eq!(device.report().fp8_runs(), 0);
    // Not even where the left one was a layer's input: its size is another.
    let tokens = wave([2, 32, 16], 0.1, &device.device());
    let linear = linear([16, 16], &device.device());
    let projected = linear.forward(tokens.clone());
    device.device().sync().unwrap();
    let before = device.report().fp8_runs();
    assert_eq!(before, 1);
    let mixed = tokens.transpose().matmul(projected.repeat_dim(2, 2));
    assert_eq!(mixed.dims(), [2, 16, 32]);
    mixed.into_data();
    assert_eq!(device.report().fp8_runs(), before);
    run();
    assert_eq!(device.report().fp8_runs(), before + 3);
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
