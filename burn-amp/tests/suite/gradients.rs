//! Gradients: of parameters under rules of one's own, and through transposed convolutions.

use burn::{
    nn::EmbeddingConfig,
    tensor::{
        DType, Device, FloatDType, Int, Tensor,
        module::{conv_transpose1d, conv_transpose2d, conv_transpose3d, conv1d, conv2d},
        ops::{ConvOptions, ConvTransposeOptions},
    },
};
use burn_amp::{Autocast, Op, Policy, Rule, full_precision};
use burn_layer::ops_come_whole;

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// 1024 gradients of 1. In bf16, 256 + 1 is 256.
#[test]
fn the_gradient_of_an_embedding_is_summed_in_f32() {
    for rule in [Rule::Lower, Rule::Full, Rule::FullKeep, Rule::Promote] {
        let policy = Policy::builder(FloatDType::BF16).rule(Op::embedding, rule);
        let lease = Autocast::new(policy.build()).lease(Device::flex()).unwrap();
        let device = lease.device().autodiff();
        let embedding = EmbeddingConfig::new(2, 1).init(&device);
        let output = embedding.forward(Tensor::<2, Int>::zeros([1, 1024], &device));
        let gradients = output.sum().backward();
        let gradient = embedding.weight.grad(&gradients).unwrap();
        assert_eq!(values(gradient), [1024.0, 0.0], "{rule:?}");
    }
}

/// As of an initial state, in a recurrence: the same weight has factors in f32 and in bf16. In bf16, 256 + 1 is 256.
#[test]
fn the_gradient_of_a_parameter_is_in_f32_whatever_else_its_factor_multiplied() {
    let lease = Autocast::bf16().lease(Device::flex()).unwrap();
    let device = lease.device().autodiff();
    let weight = Tensor::<2>::eye(4, &device).require_grad();
    let first = Tensor::<2>::ones([1, 4], &device).require_grad();
    let gradient = || {
        let second = first.clone().matmul(weight.clone());
        let loss = second.matmul(weight.clone()).sum();
        first.grad(&loss.backward()).unwrap()
    };
    let sum = (1..300).fold(gradient(), |sum, _| sum + gradient());
    assert_eq!(values(sum), [300.0; 4]);
}

/// The gradient of a weight that was used in a product is a product again. Here it is too large for fp16.
#[test]
fn the_gradient_of_a_weight_is_stored_in_f32_where_products_are_in_f32() {
    let policy = || Policy::builder(FloatDType::F16);
    for policy in [
        policy()
            .rule(Op::float_matmul, Rule::Full)
            .low_outputs(true),
        policy().rule(Op::float_matmul, Rule::FullKeep),
        policy().rule(Op::float_matmul, Rule::Full),
    ] {
        let policy = policy.build();
        let lease = Autocast::new(policy.clone()).lease(Device::flex()).unwrap();
        let device = lease.device().autodiff();
        // The result of a convolution is stored low.
        let ones = |shape| Tensor::<3>::ones(shape, &device);
        let options = ConvOptions::new([1], [0], [1], 1);
        let x = conv1d(ones([1, 1, 128]), ones([1, 1, 1]), None, options);
        let x: Tensor<2> = x.reshape([64, 2]);
        let weight = Tensor::<2>::ones([2, 1], &device).require_grad();
        let loss = x.matmul(weight.clone()).sum() * 50_000.0;
        let found = values(weight.grad(&loss.backward()).unwrap());
        assert_eq!(found, [64.0 * 50_000.0; 2], "{policy}");
    }
}

/// Burn's client computes the gradient of a transposed convolution's input as a convolution.
fn transposed(number: usize, x: Tensor<5>, weight: Tensor<5>) -> Tensor<5> {
    match number {
        1 => {
            let (x, weight) = (x.reshape([2, 3, 16]), weight.reshape([3, 2, 8]));
            let options = ConvTransposeOptions::new([2], [1], [1], [1], 1);
            conv_transpose1d(x, weight, None, options).unsqueeze_dims(&[3, 4])
        }
        2 => {
            let (x, weight) = (x.reshape([2, 3, 4, 4]), weight.reshape([3, 2, 4, 2]));
            let options = ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 1], 1);
            conv_transpose2d(x, weight, None, options).unsqueeze_dim(4)
        }
        _ => {
            let options = ConvTransposeOptions::new([2, 1, 1], [0; 3], [0; 3], [1; 3], 1);
            conv_transpose3d(x, weight, None, options)
        }
    }
}

fn wave<const D: usize>(shape: [usize; D], step: f32, device: &Device) -> Tensor<D> {
    let count = shape.iter().product::<usize>() as i64;
    let ramp = Tensor::<1, Int>::arange(0..count, device).float();
    (ramp * step).cos().reshape(shape)
}

#[test]
fn gradients_of_transposed_convolutions_are_at_the_precision_of_their_forward() {
    if !ops_come_whole() {
        return println!("SKIPPED: with Burn's own fusion, its client sends this op in parts");
    }
    for number in 1..=3 {
        let gradients = |device: Device| {
            let device = device.autodiff();
            let x = wave([2, 3, 4, 2, 2], 0.7, &device).require_grad();
            let weight = wave([3, 2, 2, 2, 2], 0.3, &device).require_grad();
            let loss = full_precision(|| transposed(number, x.clone(), weight.clone()).square());
            let gradients = loss.sum().backward();
            [
                x.grad(&gradients).unwrap(),
                weight.grad(&gradients).unwrap(),
            ]
            .map(values)
        };
        let device = Autocast::bf16().device(Device::flex()).unwrap();
        assert_eq!(gradients(device), gradients(Device::flex()), "{number}");
    }
}

/// What comes before a transposed convolution is recognized as backward too.
#[test]
fn gradients_go_through_transposed_convolutions() {
    for number in 1..=3 {
        let autocast = Autocast::bf16().lease(Device::flex()).unwrap();
        let device = autocast.device().autodiff();
        let x = wave([24, 4], 0.7, &device).require_grad();
        let weight = wave([4, 4], 0.4, &device).require_grad();
        let filter = wave([3, 2, 2, 2, 2], 0.3, &device).require_grad();
        let hidden = full_precision(|| x.clone().matmul(weight.clone()));
        let output = transposed(number, hidden.reshape([2, 3, 4, 2, 2]), filter.clone());
        // The same filter in a convolution, which is the latest use of it.
        let loss = match number {
            2 => {
                let options = ConvOptions::new([1, 1], [1, 0], [1, 1], 1);
                let output: Tensor<4> = output.squeeze_dim(4);
                conv2d(output, filter.reshape([3, 2, 4, 2]), None, options).sum()
            }
            _ => output.sum(),
        };
        let gradients = loss.backward();
        values(weight.grad(&gradients).unwrap());
        values(x.grad(&gradients).unwrap());
        // The product, and both of its gradients.
        let report = autocast.report();
        let runs = |dtype| report.runs_of(Op::float_matmul, dtype);
        assert_eq!((runs(DType::F32), runs(DType::BF16)), (3, 0), "{number}");
    }
}

/// Those of windows, and those of a tensor of which an op without a gradient, `floor`, made another one.
#[test]
fn gradients_go_through_sums_with_zeros() {
    type Apply = fn(Tensor<2>) -> Tensor<1>;
    let windows: Apply = |x| x.unfold::<3, _>(1, 2, 1).sum();
    let floor: Apply = |x| (x.clone().floor() + x).sum();
    let after_others: Apply = |x| ((x.clone().transpose().neg() * 3.0).floor() + x).sum();
    for apply in [windows, floor, after_others] {
        let autocast = Autocast::bf16().lease(Device::flex()).unwrap();
        let device = autocast.device().autodiff();
        let x = wave([4, 4], 0.7, &device).require_grad();
        let weight = wave([4, 4], 0.4, &device).require_grad();
        let gradients = apply(full_precision(|| x.clone().matmul(weight.clone()))).backward();
        values(weight.grad(&gradients).unwrap());
        values(x.grad(&gradients).unwrap());
        // The product, and both of its gradients.
        let report = autocast.report();
        let runs = |dtype| report.runs_of(Op::float_matmul, dtype);
        assert_eq!((runs(DType::F32), runs(DType::BF16)), (3, 0));
    }
}

/// By the rule of the transposed convolution.
#[test]
fn a_rule_of_transposed_convolutions_holds_for_their_gradients() {
    if !ops_come_whole() {
        return println!("SKIPPED: with Burn's own fusion, its client sends this op in parts");
    }
    let policy = Policy::builder(FloatDType::BF16).rule(Op::conv_transpose2d, Rule::Full);
    let autocast = Autocast::new(policy.build()).lease(Device::flex()).unwrap();
    let device = autocast.device().autodiff();
    let x = wave([2, 3, 4, 2, 2], 0.7, &device).require_grad();
    let filter = wave([3, 2, 2, 2, 2], 0.3, &device).require_grad();
    let gradients = transposed(2, x.clone(), filter).sum().backward();
    values(x.grad(&gradients).unwrap());
    let report = autocast.report();
    assert_eq!(report.runs_of(Op::conv2d, DType::F32), 1);
    assert_eq!(report.runs(DType::BF16), 0);
}
