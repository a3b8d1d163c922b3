//! Ops that are not in PyTorch's lists, and in which 16 bits alone would be wrong.

use burn::{
    module::Param,
    nn::{
        Linear, LinearConfig,
        loss::BinaryCrossEntropyLossConfig,
        pool::{AdaptiveAvgPool2dConfig, AvgPool2dConfig},
    },
    tensor::{Device, FloatDType, Int, Tensor, activation::sigmoid},
};
use burn_amp::{Autocast, full_precision};

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// A tensor of these values that is stored low: a product with the identity.
fn low(values: [f32; 2], device: &Device) -> Tensor<2> {
    let identity = Tensor::<2>::from_floats([[1.0, 0.0], [0.0, 1.0]], device);
    Tensor::<2>::from_floats([values], device).matmul(identity)
}

/// As PyTorch's kernels have them: the result is rounded, the scalar is not.
#[test]
fn scalars_are_not_rounded() {
    for (autocast, dtype) in [
        (Autocast::fp16(), FloatDType::F16),
        (Autocast::bf16(), FloatDType::BF16),
    ] {
        let device = autocast.device(Device::flex()).unwrap();
        let x = [1000.0, 3.5];
        let rounded = |exact: [f32; 2]| {
            let exact = Tensor::<1>::from_floats(exact, &Device::flex());
            values(exact.cast(dtype).cast(FloatDType::F32))
        };
        let x_low = || low(x, &device);
        for (found, exact) in [
            // 1e5 is more than fp16 holds.
            (x_low() / 1e5, x.map(|x| x / 1e5)),
            (x_low() * 0.1, x.map(|x| x * 0.1)),
            (x_low() + 0.1, x.map(|x| x + 0.1)),
            (x_low() - 0.1, x.map(|x| x - 0.1)),
        ] {
            assert_eq!(values(found), rounded(exact), "{dtype:?}");
        }
    }
}

/// Of more ones than fp16 counts.
#[test]
fn average_pools_sum_in_f32() {
    let device = Autocast::fp16().device(Device::flex()).unwrap();
    let ones = || {
        let column = Tensor::<4>::ones([1, 1, 64, 1], &device);
        column.matmul(Tensor::ones([1, 1, 1, 64], &device))
    };
    let all = AdaptiveAvgPool2dConfig::new([1, 1]).init();
    assert_eq!(values(all.forward(ones())), [1.0]);
    let all = AvgPool2dConfig::new([64, 64]).init();
    assert_eq!(values(all.forward(ones())), [1.0]);
}

/// PyTorch refuses this loss under autocast. A probability that was rounded to 1 would have a gradient of NaN.
#[test]
fn probabilities_have_gradients_for_their_logarithms() {
    let gradients = |device: Device| {
        let device = device.autodiff();
        let mut linear: Linear = LinearConfig::new(1, 1).with_bias(true).init(&device);
        linear.weight = Param::from_tensor(Tensor::from_floats([[1.0]], &device).require_grad());
        linear.bias = Some(Param::from_tensor(
            Tensor::zeros([1], &device).require_grad(),
        ));
        let x = Tensor::<2>::from_floats([[9.0], [-9.0], [7.5], [0.5]], &device);
        let targets = Tensor::<2, Int>::from_ints([[1], [0], [1], [0]], &device);
        let loss = BinaryCrossEntropyLossConfig::new().init(&device);
        let loss = loss.forward(sigmoid(linear.forward(x)), targets);
        let gradients = loss.backward();
        values(linear.weight.val().grad(&gradients).unwrap())[0]
    };
    let exact = gradients(Device::flex());
    for autocast in [Autocast::bf16(), Autocast::fp16()] {
        let found = gradients(autocast.device(Device::flex()).unwrap());
        assert!(
            (found - exact).abs() < 0.02 * exact.abs(),
            "{found}, {exact}"
        );
    }
}

#[test]
fn what_a_region_computed_in_f32_stays_so_when_a_bias_is_added_outside() {
    let device = Autocast::fp16().device(Device::flex()).unwrap();
    let x = || Tensor::<2>::full([2, 2], 300.0, &device);
    let bias = Tensor::<1>::ones([2], &device);
    let product = full_precision(|| x().matmul(x()));
    assert_eq!(values(product + bias.clone().unsqueeze()), [180_001.0; 4]);
    // More than fp16 holds.
    let product = x().matmul(x());
    assert_eq!(values(product + bias.unsqueeze()), [f32::INFINITY; 4]);
}
