//! The three products of a layer, against the same by burn-fp8.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_amp::{
    Autocast, OpCount, Policy,
    recipe::{
        BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, LinearCasts, RecipeFormat,
        RowwiseScaling,
    },
};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Tensor, scaled_matmul};

use super::{linear, noise, values, wave};
use crate::suite::devices::cube_devices;

fn rows(tensor: &Tensor<3>) -> Tensor<2> {
    tensor.clone().flatten(0, 1)
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
