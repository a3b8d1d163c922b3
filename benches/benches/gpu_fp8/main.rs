//! What do fp8 casts, products and layers cost on a GPU, compared with a copy, Burn's products and layers in bf16, and PyTorch's
//! `torch._scaled_mm` (cuBLASLt), if it is installed? Arguments choose questions by name.

mod casts;
mod layers;
mod products;

use benches::{is_selected, log_warnings, share_of_time, time_left};
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::Duration,
};

fn main() -> ExitCode {
    log_warnings();
    // The time limit counts from here.
    time_left();
    let device = Device::cuda(0);
    let shapes = selected(&casts::SHAPES, |shape| format!("quantize {shape:?}"));
    let sizes = selected(&products::SIZES, |[m, k, n]| format!("product {m}x{k}x{n}"));
    let layers = selected(&layers::SHAPES, |[rows, from, to]| {
        format!("linear {rows}x{from}x{to}")
    });
    let torch = products::torch(&sizes);
    let mut left = shapes.len() + sizes.len() + layers.len();
    let mut failed = false;
    // If one question fails, the others are still asked, and share the time that is left.
    let mut ask = |question: &dyn Fn(Option<Duration>)| {
        let share = share_of_time(left);
        left -= 1;
        let end = catch_unwind(AssertUnwindSafe(|| question(share)));
        failed |= end.is_err();
    };
    for shape in shapes {
        ask(&|share| casts::compare(shape, &device, share));
    }
    for size in sizes {
        ask(&|share| products::compare(size, &device, &torch, share));
    }
    for shape in layers {
        ask(&|share| layers::compare(shape, &device, share));
    }
    ExitCode::from(u8::from(failed))
}

fn selected<const N: usize>(
    all: &[[usize; N]],
    name: impl Fn(&[usize; N]) -> String,
) -> Vec<[usize; N]> {
    let all = all.iter().copied();
    all.filter(|one| is_selected(&name(one))).collect()
}

fn random(shape: [usize; 2], device: &Device) -> Tensor<2> {
    let x = Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), device);
    x.cast(FloatDType::BF16)
}

/// Waits until everything is computed.
fn sync(device: &Device) {
    device.sync().expect("the device computes");
}

/// Submits queued ops to the device, so that they are not fused with later ones.
fn flush(device: &Device) {
    device.flush().expect("the device computes");
}

/// The norm of the difference between two tensors, relative to the norm of `expected`: 0 if they are the same, NaN if a
/// value is NaN.
///
/// # Errors
/// If the device could not compute one of them, which it only reports when values are read.
fn distance(found: Tensor<2>, expected: Tensor<2>) -> Result<f32, String> {
    let [found, expected] = [found, expected].map(|x| x.cast(FloatDType::F32));
    let norm = |x: Tensor<2>| {
        let squares = (x.clone() * x).sum().try_into_scalar::<f32>();
        squares.map(f32::sqrt).map_err(|error| error.to_string())
    };
    Ok(norm(found - expected.clone())? / norm(expected)?)
}

/// Panics if the device could not compute a tensor.
fn is_computed(x: Tensor<2>) {
    let corner = x.slice([0..1, 0..1]).try_into_data();
    corner.expect("the device computes");
}
