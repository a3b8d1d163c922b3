//! What do fp8 casts, products and layers cost on a GPU, compared with a copy, Burn's products and layers in bf16, and PyTorch's
//! `torch._scaled_mm` (cuBLASLt), if it is installed? Arguments choose questions by name: `quantize`, `product`, `linear`, or one of
//! their sizes.

mod casts;
mod layers;
mod products;
mod question;

use benches::{is_selected, is_unchecked, log_warnings, share_of_time, time_left};
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use question::{Known, Question};
use std::{process::ExitCode, time::Duration};

/// A routine's first product may take one of so many parts of the time that is left, but no less than it takes to start CUDA and to
/// compile kernels.
const FIRST: usize = 8;
const FIRST_AT_LEAST: Duration = Duration::from_secs(45);

fn main() -> ExitCode {
    log_warnings();
    // The time limit counts from here.
    time_left();
    if let Some((question, known)) = Question::of_this_process() {
        question.answer(&known, &Device::cuda(0));
        return ExitCode::SUCCESS;
    }
    let casts = casts::SHAPES.map(Question::Quantize).into_iter();
    let products = products::SIZES.map(Question::Product);
    let layers = layers::SHAPES.map(Question::Linear);
    let questions = casts.chain(products).chain(layers);
    let questions: Vec<_> = questions
        .filter(|question| is_selected(&question.to_string()))
        .collect();
    let known = known_before(&questions);
    let mut failed = !known.broken.is_empty();
    for (number, question) in questions.iter().enumerate() {
        // A question may take half of the time that is left, so that one that hangs leaves time to the others, and the last all.
        let limit = share_of_time((questions.len() - number).min(2));
        failed |= !question.ask(&known, limit);
    }
    ExitCode::from(u8::from(failed))
}

/// What the questions about products need: PyTorch's products, and which routines cannot be asked for.
fn known_before(questions: &[Question]) -> Known {
    let sizes = questions.iter().filter_map(|question| match question {
        Question::Product(size) => Some(*size),
        _ => None,
    });
    let sizes: Vec<_> = sizes.collect();
    let mut known = Known::default();
    if let Some(first) = sizes.first() {
        known.torch = products::torch(&sizes);
        for routine in products::native_routines() {
            let limit = share_of_time(FIRST).map(|share| share.max(FIRST_AT_LEAST));
            if !Question::Routine(routine, *first).ask(&known, limit) {
                known.broken.push(routine);
            }
        }
    }
    known
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
    let (off, all) = (norm(found - expected.clone())?, norm(expected)?);
    Ok(if is_unchecked() { 0.0 } else { off / all })
}

/// Panics if the device could not compute a tensor.
fn is_computed(x: Tensor<2>) {
    let corner = x.slice([0..1, 0..1]).try_into_data();
    corner.expect("the device computes");
}
