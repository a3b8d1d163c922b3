//! What convolutions and gradients of max pools on CubeCL's devices add up, against f32.

use burn::tensor::{
    Device, FloatDType, Tensor, TensorData,
    module::{conv_transpose2d, conv2d, max_pool2d},
    ops::{ConvOptions, ConvTransposeOptions, MaxPoolOptions},
};
use burn_amp::{Autocast, Policy};

use super::devices::cube_devices;

/// Positive numbers, whose sums grow, that are exact in bf16.
fn positive(shape: [usize; 4], device: &Device) -> Tensor<4> {
    let number = |place: usize| ((place * 37 + 11) % 29 + 1) as f32 / 32.0;
    let numbers: Vec<f32> = (0..shape.iter().product()).map(number).collect();
    Tensor::<4>::from_data(TensorData::new(numbers, shape), device).require_grad()
}

fn values(tensor: Tensor<4>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// The output, and the gradients of input and filter.
fn pass(device: &Device, x: [usize; 4], filter: [usize; 4], groups: usize) -> [Vec<f32>; 3] {
    let device = device.clone().autodiff();
    let [x, filter] = [x, filter].map(|shape| positive(shape, &device));
    let output = match groups {
        // Transposed.
        0 => {
            let options = ConvTransposeOptions::new([2, 2], [1, 1], [0, 0], [1, 1], 1);
            conv_transpose2d(x.clone(), filter.clone(), None, options)
        }
        _ => {
            let padding = filter.dims()[2] / 2;
            let options = ConvOptions::new([1, 1], [padding; 2], [1, 1], groups);
            conv2d(x.clone(), filter.clone(), None, options)
        }
    };
    let gradients = output.clone().sum().backward();
    let gradients = [x, filter].map(|it| values(it.grad(&gradients).unwrap()));
    let [of_x, of_filter] = gradients;
    [values(output), of_x, of_filter]
}

/// The largest error relative to the value.
fn error(found: &[f32], expected: &[f32]) -> f32 {
    let errors = found.iter().zip(expected).map(|(a, b)| (a / b - 1.0).abs());
    errors.fold(0.0, f32::max)
}

#[test]
fn convolutions_add_up_in_f32() {
    let cases = [
        ("dense", [2, 32, 8, 8], [16, 32, 3, 3], 1),
        ("depthwise", [4, 8, 32, 32], [8, 1, 3, 3], 8),
        ("transposed", [2, 64, 4, 4], [64, 8, 4, 4], 0),
    ];
    for plain in cube_devices() {
        let Ok(lease) = Autocast::bf16().lease(plain.clone()) else {
            println!("SKIPPED: {plain:?} has no bf16");
            continue;
        };
        #[cfg(feature = "cpu")]
        let on_cpu = plain == Device::cpu();
        #[cfg(not(feature = "cpu"))]
        let on_cpu = false;
        for (name, x, filter, groups) in cases {
            let expected = pass(&plain, x, filter, groups);
            let found = pass(&lease.device(), x, filter, groups);
            for (found, expected) in found.iter().zip(&expected) {
                let error = error(found, expected);
                println!("{name}: {error:.4}");
                // On a GPU, Burn chooses the fastest kernel for a dense convolution, which for small ones may have no tensor cores.
                let chosen = name == "dense" && !on_cpu;
                // The result is rounded to bf16, and so is a sum of 9 products, at each of them.
                assert!(error < 0.02 || chosen, "{name}: {error}");
            }
        }
        // What is worse if it is allowed to be. On a GPU, that depends on the kernel that is the fastest.
        let reduced = Autocast::bf16().reduced_precision_reduction(true);
        let reduced = reduced.lease(plain.clone()).unwrap();
        let (name, x, filter, groups) = cases[1];
        let expected = pass(&plain, x, filter, groups);
        let found = pass(&reduced.device(), x, filter, groups);
        let error = error(&found[2], &expected[2]);
        println!("{name}, reduced precision: {error:.3}");
        assert!(error > 0.1 || !on_cpu);
    }
}

/// What a program itself computes in 16 bits, without autocast, is as on the plain device; on NVIDIA GPUs with cuDNN it adds up in f32.
#[test]
fn without_autocast_nothing_is_added_up_in_f32() {
    for plain in cube_devices() {
        let lease = Autocast::new(Policy::o0()).lease(plain.clone()).unwrap();
        if !plain.supports_dtype(FloatDType::BF16) {
            println!("SKIPPED: {plain:?} has no bf16");
            continue;
        }
        let depthwise = |device: &Device, sums: FloatDType| {
            let device = device.clone().autodiff();
            let low = |shape| {
                let low = positive(shape, &device).cast(FloatDType::BF16);
                low.cast(sums)
            };
            let options = ConvOptions::new([1, 1], [0; 2], [1, 1], 8);
            let output = conv2d(low([1, 8, 16, 16]), low([8, 1, 16, 16]), None, options);
            values(output.cast(FloatDType::BF16).cast(FloatDType::F32))
        };
        let expected = depthwise(&plain, FloatDType::BF16);
        let found = depthwise(&lease.device(), FloatDType::BF16);
        if found != expected {
            assert!(
                format!("{plain:?}").contains("Cuda"),
                "{plain:?}: {found:?}, {expected:?}"
            );
            let exact = depthwise(&Device::flex(), FloatDType::F32);
            assert_eq!(found, exact, "{plain:?}");
        }
    }
}

/// Where the largest number is in 169 windows, it gets all of their gradients.
#[test]
fn gradients_of_windows_are_added_up_in_f32() {
    for plain in cube_devices() {
        let Ok(lease) = Autocast::bf16().lease(plain.clone()) else {
            println!("SKIPPED: {plain:?} has no bf16");
            continue;
        };
        let expected = 169.0 * 0.7109375;
        let error = |device: Device| gathered(&device.autodiff()) / expected - 1.0;
        let found = error(lease.device()).abs();
        assert!(found < 0.004, "{plain:?}: {found}");
        // Burn's kernel adds in the dtype of its inputs.
        let reduced = Autocast::bf16().reduced_precision_reduction(true);
        let reduced = reduced.lease(plain).unwrap();
        let found = error(reduced.device()).abs();
        assert!(found > 0.01, "otherwise: {found}");
    }
}

/// What the largest number of an image gets of the gradients of all windows, with a stride of 1.
fn gathered(device: &Device) -> f32 {
    let mut numbers = vec![0.0; 32 * 32];
    numbers[16 * 32 + 16] = 1.0;
    let data = TensorData::new(numbers, [1, 1, 32, 32]);
    let x = Tensor::<4>::from_data(data, device).require_grad();
    // Between products, so that it and the gradients of the windows are stored low.
    let low = x.clone().matmul(Tensor::<2>::eye(32, device).unsqueeze());
    let options = MaxPoolOptions::new([13, 13])
        .with_stride([1, 1])
        .with_padding([6, 6]);
    let output = max_pool2d(low, options);
    // No power of two, so that sums are rounded.
    let factor = Tensor::<2>::eye(32, device).mul_scalar(0.7109375);
    let gradients = output.matmul(factor.unsqueeze()).sum().backward();
    values(x.grad(&gradients).unwrap())[16 * 32 + 16]
}
