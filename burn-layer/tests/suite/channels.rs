//! Sums by channel, against sums in f64.

use super::devices::devices_and_cpu;
use burn::{backend::Flex, tensor::Device};
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_dispatch::DispatchDevice;
use burn_layer::{fuses_ops, sum_by_channel};
use burn_std::reader::try_read_sync;

fn check<B: Backend>(device: &B::Device, fuses: bool) {
    assert_eq!(fuses_ops::<B>(device), fuses);
    for dims in [
        &[3, 4][..],
        &[40, 3],
        &[1, 1],
        &[1, 2, 1],
        &[2, 3, 7],
        &[16, 2, 3],
        &[2, 3, 4, 5],
        &[17, 5, 3, 1],
        &[3, 2, 2, 3, 4],
    ] {
        // In this order of dimensions, and turned into it from one with channels last, as a convolution leaves them.
        for turned in [false, true] {
            sums_are_right::<B>(dims, turned, device);
        }
    }
}

fn sums_are_right<B: Backend>(dims: &[usize], turned: bool, device: &B::Device) {
    let mut lie = dims.to_vec();
    if turned {
        let channels = lie.remove(1);
        lie.push(channels);
    }
    let number = |place: usize| ((place * 7 + place / 5) % 23) as f32 - 9.5;
    let all = dims.iter().product();
    let numbers: Vec<f32> = (0..all).map(number).collect();
    let channels = dims[1];
    let inner: usize = dims[2..].iter().product();
    let mut expected = vec![0.0; channels];
    for (place, number) in numbers.iter().enumerate() {
        let channel = match turned {
            true => place % channels,
            false => place / inner % channels,
        };
        expected[channel] += 0.25 * f64::from(*number);
    }
    let x = B::float_from_data(TensorData::new(numbers, lie.clone()), device);
    let x = match turned {
        true => {
            let last = lie.len() - 1;
            let order = [0, last].into_iter().chain(1..last);
            B::float_permute(x, &order.collect::<Vec<_>>())
        }
        false => x,
    };
    assert_eq!(x.shape().as_slice(), dims);
    let sums = sum_by_channel::<B>(x, 0.25);
    let mut by_channel = vec![1; dims.len()];
    by_channel[1] = channels;
    assert_eq!(sums.shape().as_slice(), by_channel);
    let sums = try_read_sync(B::float_into_data(sums)).unwrap().unwrap();
    for (found, expected) in sums.iter::<f64>().zip(expected) {
        let what = format!("{dims:?}, turned: {turned}: {found} and {expected}");
        assert!((found - expected).abs() < 1e-3, "{what}");
    }
}

#[test]
fn they_are_those_of_all_samples_in_any_order_of_dimensions() {
    for device in devices_and_cpu() {
        let fuses = cfg!(feature = "fusion") && device != Device::flex();
        match device.as_dispatch() {
            DispatchDevice::Flex(device) => check::<Flex>(device, fuses),
            #[cfg(feature = "cubecl")]
            DispatchDevice::Cube(device) => check::<burn::backend::Cube>(device, fuses),
            device => unreachable!("{device:?} is no device to test"),
        }
    }
}
