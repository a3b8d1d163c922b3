//! The FFTs of `burn::signal` on autocast devices.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    signal::{StftOptions, stft},
    tensor::{DType, Device, Tensor, TensorData},
};
use burn_amp::Autocast;

use super::devices::devices;

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

fn wave<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let number = |place: usize| (place as f32 * 0.37).sin() + (place as f32 * 1.3).cos();
    let numbers: Vec<f32> = (0..shape.iter().product()).map(number).collect();
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

/// The power of each frequency over time: `[frames, frequencies]`.
fn power(signal: Tensor<1>) -> Tensor<2> {
    let options = StftOptions {
        center: false,
        ..StftOptions::new(16)
    };
    let spectrum = stft(signal.unsqueeze(), None, options);
    spectrum.powi_scalar(2).sum_dim(3).squeeze_dims(&[0, 3])
}

/// The gradient of the layer ahead of the transform in a model that filters a signal and weighs its frequencies.
fn gradient(device: &Device, [filter, weigh]: &[Linear; 2]) -> Vec<f32> {
    let [filter, weigh] = [filter, weigh].map(|it| it.clone().fork(device));
    let filtered = filter.forward(wave([4, 16], device)).reshape([64]);
    let loss = weigh.forward(power(filtered).div_scalar(1024.0)).mean();
    values(filter.weight.grad(&loss.backward()).unwrap())
}

#[test]
fn ffts_are_in_full_precision_forward_and_backward() {
    for plain in devices() {
        let layers = [[16, 16], [9, 1]].map(|size| {
            let mut linear = LinearConfig::new(size[0], size[1]).init(&plain.clone().autodiff());
            linear.weight = linear
                .weight
                .map(|it| wave(size, &it.device()).require_grad());
            linear
        });
        for autocast in [Autocast::bf16(), Autocast::fp16()] {
            let Ok(device) = autocast.device(plain.clone()) else {
                println!("SKIPPED: a 16-bit type that {plain:?} has not");
                continue;
            };
            let spectrum = power(wave([64], &device));
            assert_eq!(spectrum.dtype(), DType::F32);
            assert_eq!(values(spectrum), values(power(wave([64], &plain))));
            let found = gradient(&device.autodiff(), &layers);
            let expected = gradient(&plain.clone().autodiff(), &layers);
            let square =
                |of: &dyn Fn(usize) -> f32| (0..found.len()).map(|at| of(at).powi(2)).sum::<f32>();
            let error = square(&|at| found[at] - expected[at]) / square(&|at| expected[at]);
            // The layers themselves are in 16 bits.
            assert!(error > 0.0 && error < 1e-4, "{error}");
        }
    }
}
