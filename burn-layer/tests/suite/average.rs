//! Moving averages of vectors, which are computed later on a backend that fuses ops.

use super::devices::{Leased, devices_and_cpu};
use burn::tensor::{Device, Tensor};
use burn_layer::{Layer, Layers};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

#[derive(Debug)]
struct Counted(#[allow(dead_code)] Arc<()>);
impl Layer for Counted {}

fn values(tensor: Tensor<1>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Averages that are read at once, after an op of a network, by another thread, as a part of another average, and never.
fn averages(device: &Device) -> Vec<Vec<f64>> {
    let vector = |numbers: [f32; 3]| Tensor::<1>::from_floats(numbers, device);
    let toward = |old: Tensor<1>, new: [f32; 3]| {
        let new = vector(new).mul_scalar(0.25);
        old.mul_scalar(0.75) + new
    };
    let network = || {
        let square = Tensor::<2>::eye(3, device);
        square.clone().matmul(square)
    };
    let first = toward(vector([1.0, 2.0, 4.0]), [8.0, 16.0, -4.0]);
    let second = toward(first.clone(), [4.0, 0.0, 0.5]);
    let at_once = values(first.clone());
    network();
    let third = toward(second.clone(), [2.0, 2.0, 2.0]);
    let read_elsewhere = toward(third.clone(), [1.0, -1.0, 1.0]);
    let elsewhere = std::thread::scope(|scope| {
        let thread = scope.spawn(|| values(read_elsewhere.clone()));
        thread.join().unwrap()
    });
    let _never = toward(third.clone(), [0.0; 3]);
    let row = values(second.clone().unsqueeze::<2>().matmul(network()).squeeze());
    // Terms that are none: a sum of one number, of a matrix, of a vector with itself, and of a broadcast.
    let of_one = vector([1.0, 2.0, 3.0]).mul_scalar(2.0) + vector([1.0; 3]);
    let itself = {
        let half = vector([1.0, 2.0, 3.0]).mul_scalar(0.5);
        half.clone() + half
    };
    let one = Tensor::<1>::from_floats([3.0], device).mul_scalar(2.0);
    let broadcast = vector([1.0, 2.0, 3.0]).mul_scalar(2.0) + one;
    network();
    let last = toward(third.clone(), [8.0, 8.0, 8.0]);
    vec![
        at_once,
        elsewhere,
        row,
        values(of_one),
        values(itself),
        values(broadcast),
        values(last),
        values(third),
        values(second),
        values(first),
    ]
}

#[test]
fn they_are_as_on_the_plain_device() {
    // All these numbers are exact in f32.
    let expected = averages(&Device::flex());
    assert_eq!(expected[0], [2.75, 5.5, 2.0]);
    for plain in devices_and_cpu() {
        let device = Layers::on(plain.clone())
            .layer(Counted(Arc::default()))
            .leased();
        for _ in 0..2 {
            assert_eq!(averages(&device), expected, "{plain:?}");
        }
    }
}

/// What waits for an op of a network does not keep the device, which drops its layers when it ends.
#[test]
fn those_that_nobody_needs_end_with_the_device() {
    for plain in devices_and_cpu() {
        let alive = Arc::new(());
        let layer = Counted(alive.clone());
        let lease = Layers::on(plain.clone()).layer(layer).lease().unwrap();
        let device = lease.device();
        let vector = Tensor::<1>::from_floats([1.0, 2.0], &device);
        let average = vector.clone().mul_scalar(0.5) + vector.mul_scalar(0.5);
        device.sync().unwrap();
        assert_eq!(Arc::strong_count(&alive), 2);
        drop((average, lease));
        let deadline = Instant::now() + Duration::from_secs(30);
        while Arc::strong_count(&alive) > 1 {
            assert!(Instant::now() < deadline, "{plain:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
