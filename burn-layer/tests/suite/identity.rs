//! Reductions along dimensions of one element.

use super::devices::Leased;
use burn::tensor::{Device, Tensor};
use burn_layer::Layers;

type Reduction = fn(Tensor<3>, usize) -> Tensor<3>;

const REDUCTIONS: [(&str, Reduction); 5] = [
    ("sum", |x, dim| x.sum_dim(dim)),
    ("mean", |x, dim| x.mean_dim(dim)),
    ("prod", |x, dim| x.prod_dim(dim)),
    ("max", |x, dim| x.max_dim(dim)),
    ("min", |x, dim| x.min_dim(dim)),
];

/// Along any other dimension they reduce, as on a plain device.
#[test]
fn they_change_nothing() {
    let plain = Device::flex();
    let layered = Layers::on(plain.clone()).leased();
    let [x, y] = [&plain, &layered].map(|device| {
        Tensor::<3>::from_data([[[1.5, -2.0]], [[0.25, 3.0]], [[-7.0, 0.1]]], device)
    });
    for (name, reduce) in REDUCTIONS {
        for dim in 0..3 {
            let expected = reduce(x.clone(), dim).into_data();
            assert_eq!(reduce(y.clone(), dim).into_data(), expected, "{name} {dim}");
        }
        let same = reduce(y.clone(), 1).into_data();
        assert_eq!(same, x.to_data(), "{name}");
    }
}

/// A sum begins with 0, and so would lose the sign of a zero.
#[test]
fn they_are_left_out() {
    let layered = Layers::on(Device::flex()).leased();
    let zero = Tensor::<2>::from_data([[-0.0f32]], &layered);
    for sum in [zero.clone().sum_dim(1), zero.sum_dims(&[0, 1])] {
        let sum: f32 = sum.into_scalar();
        assert!(sum == 0.0 && sum.is_sign_negative());
    }
}
