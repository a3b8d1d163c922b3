//! The FFTs of `burn::signal` on layered devices, against the formula and the plain device.

use burn::{
    signal::{StftOptions, hann_window, irfft, istft, rfft, stft},
    tensor::{Device, Tensor, TensorData},
};
use burn_flex::{Flex, FlexDevice};
use burn_layer::{Layers, fft_ops};
use std::f64::consts::TAU;

use super::devices::{Leased, devices_and_cpu};

fn wave<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let number = |place: usize| (place as f32 * 0.37).sin() + (place % 5) as f32;
    let numbers: Vec<f32> = (0..shape.iter().product()).map(number).collect();
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

fn assert_near(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (f64::from(*found) - expected).abs() < 1e-4,
            "{found} {expected}"
        );
    }
}

fn layered() -> Vec<(Device, Device)> {
    let serve = |plain: Device| (Layers::on(plain.clone()).leased(), plain);
    let over = Layers::over::<Flex>(FlexDevice).custom_ops::<Flex>(fft_ops::<Flex>());
    let over = (over.leased(), Device::flex());
    let plain = devices_and_cpu().into_iter();
    plain.map(serve).chain([over]).collect()
}

#[test]
fn a_spectrum_is_the_sum_of_the_formula_and_returns_to_the_signal() {
    for (device, _) in layered() {
        let signal = wave([2, 8], &device);
        let numbers = values(signal.clone());
        let (real, imaginary) = rfft(signal, 1, None);
        assert_eq!(real.dims(), [2, 5]);
        let spectrum = |part: fn(f64) -> f64| -> Vec<f64> {
            let rows = numbers.chunks(8);
            let bins = rows.flat_map(|row| (0..5).map(move |bin| (row, bin)));
            let sum = |(row, bin): (&[f32], usize)| {
                let term = |(place, x): (usize, &f32)| {
                    f64::from(*x) * part(-TAU * (bin * place) as f64 / 8.0)
                };
                row.iter().enumerate().map(term).sum()
            };
            bins.map(sum).collect()
        };
        assert_near(&values(real.clone()), &spectrum(f64::cos));
        assert_near(&values(imaginary.clone()), &spectrum(f64::sin));
        let back = values(irfft(real, imaginary, 1, None));
        let expected: Vec<f64> = numbers.iter().map(|x| f64::from(*x)).collect();
        assert_near(&back, &expected);
    }
}

#[test]
fn lengths_and_dimensions_are_those_of_the_plain_device() {
    for (device, plain) in layered() {
        for (dim, length) in [(0, None), (1, Some(4)), (1, Some(16))] {
            let run = |device: &Device| {
                let (real, imaginary) = rfft(wave([4, 8], device), dim, length);
                let back = irfft(real.clone(), imaginary.clone(), dim, length);
                (back.dims(), [real, imaginary, back].map(values))
            };
            assert_eq!(run(&device), run(&plain));
        }
    }
}

#[test]
fn a_short_time_transform_has_the_gradient_of_the_plain_device() {
    for (device, plain) in layered() {
        let run = |device: &Device| {
            let device = device.clone().autodiff();
            let signal = wave([1, 64], &device).require_grad();
            let window = hann_window(16, true, &device);
            let options = StftOptions {
                hop_length: 8,
                ..StftOptions::new(16)
            };
            let spectrum = stft(signal.clone(), Some(window.clone()), options);
            let back = istft(spectrum.clone(), Some(window), None, options);
            let gradients = spectrum.powi_scalar(2).sum().backward();
            (values(back), values(signal.grad(&gradients).unwrap()))
        };
        assert_eq!(run(&device), run(&plain));
    }
}
