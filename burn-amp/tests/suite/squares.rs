//! Squares, which fp16 cannot hold from 256 on. Burn sends them as products; PyTorch's `pow`, its
//! norms and its losses compute them in f32.

use burn::{
    nn::{
        LayerNormConfig, RmsNormConfig,
        loss::{MseLoss, Reduction},
    },
    tensor::{DType, Device, FloatDType, Tensor, activation},
};
use burn_amp::{Autocast, Op, Policy, Rule};

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Numbers that fp16 holds and whose squares it does not, stored low.
fn large(device: &Device) -> Tensor<2> {
    let x = Tensor::<2>::from_floats([[300.0, -400.0, 16.0, 350.0]], device);
    x.matmul(Tensor::eye(4, device))
}

#[test]
fn squares_run_in_f32() {
    let autocast = Autocast::fp16().lease(Device::flex()).unwrap();
    let x = large(&autocast.device());
    let exact = [90_000.0, 160_000.0, 256.0, 122_500.0];
    assert_eq!(values(x.clone().square()), exact);
    assert_eq!(values(x.clone().powi_scalar(2)), exact);
    assert_eq!(values(x.clone().powf_scalar(2.0)), exact);
    assert_eq!(values(x.clone() * x.clone()), exact);
    let report = autocast.report();
    assert_eq!(report.runs_of(Op::float_mul, DType::F32), 4);
    // A product of two tensors stays as they are stored, whatever their values.
    let product = x.clone() * large(&autocast.device());
    assert!(values(product)[0].is_infinite());
    let report = autocast.report();
    assert_eq!(report.runs_of(Op::float_mul, DType::F16), 1);
}

#[test]
fn norms_and_losses_of_large_numbers_are_those_of_f32() {
    let run = |device: &Device| {
        let x = large(device);
        let norm = RmsNormConfig::new(4).init(device).forward(x.clone());
        let loss = MseLoss::new().forward(x.clone(), x.neg(), Reduction::Mean);
        [values(norm), values(loss)].concat()
    };
    let fp16 = Autocast::fp16().device(Device::flex()).unwrap();
    for (low, exact) in run(&fp16).into_iter().zip(run(&Device::flex())) {
        assert!(
            (low - exact).abs() <= exact.abs() / 1024.0,
            "{low}, in f32 {exact}"
        );
    }
}

#[test]
fn a_policy_decides_about_squares_by_its_rule_for_powers() {
    let policy = Policy::builder(FloatDType::F16);
    let policy = policy.rule(Op::float_powi_scalar, Rule::Promote).build();
    let lease = Autocast::new(policy).lease(Device::flex()).unwrap();
    assert!(values(large(&lease.device()).square())[0].is_infinite());
}

/// `O2` and `O3` store low what norms give, and not what they compute on the way.
#[test]
fn low_outputs_are_those_of_norms_not_of_their_parts() {
    let run = |device: &Device| {
        let x = large(device);
        let norm = RmsNormConfig::new(4).init(device).forward(x.clone());
        // A device in training computes it by several ops.
        let layer_norm = LayerNormConfig::new(4).init(&device.clone().autodiff());
        let layer_norm = layer_norm.forward(large(&device.clone().autodiff()));
        let soft = activation::softplus(x / 25.0, 1.0);
        [values(norm), values(layer_norm), values(soft)].concat()
    };
    for policy in [Policy::o2(), Policy::o3()] {
        let lease = Autocast::new(policy).lease(Device::flex()).unwrap();
        for (low, exact) in run(&lease.device()).into_iter().zip(run(&Device::flex())) {
            assert!(
                (low - exact).abs() <= exact.abs() / 512.0 + 1e-6,
                "{low}, in f32 {exact}"
            );
        }
    }
}
