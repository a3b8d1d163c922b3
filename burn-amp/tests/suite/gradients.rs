//! Gradients of parameters under rules of one's own: they are stored in f32 under all of them.

use burn::{
    nn::EmbeddingConfig,
    tensor::{Device, FloatDType, Int, Tensor, module::conv1d, ops::ConvOptions},
};
use burn_amp::{Autocast, Op, Policy, Rule};

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// 1024 gradients of 1. In bf16, 256 + 1 is 256.
#[test]
fn the_gradient_of_an_embedding_is_summed_in_f32() {
    for rule in [Rule::Lower, Rule::Full, Rule::FullKeep, Rule::Promote] {
        let policy = Policy::builder(FloatDType::BF16).rule(Op::embedding, rule);
        let device = Autocast::new(policy.build()).device(Device::flex());
        let device = device.unwrap().autodiff();
        let embedding = EmbeddingConfig::new(2, 1).init(&device);
        let output = embedding.forward(Tensor::<2, Int>::zeros([1, 1024], &device));
        let gradients = output.sum().backward();
        let gradient = embedding.weight.grad(&gradients).unwrap();
        assert_eq!(values(gradient), [1024.0, 0.0], "{rule:?}");
    }
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
        let device = Autocast::new(policy.clone()).device(Device::flex());
        let device = device.unwrap().autodiff();
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
