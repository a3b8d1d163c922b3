//! Models in training: what Burn takes apart for autodiff, and what gradients are stored in.

use burn::{
    nn::{EmbeddingConfig, LinearConfig, conv::Conv2dConfig, loss::CrossEntropyLossConfig},
    tensor::{DType, Device, Distribution, FloatDType, Gradients, Int, Tensor, activation},
};
use burn_amp::{Autocast, AutocastLease, Op, Policy, Rule};

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

fn bf16() -> AutocastLease {
    Autocast::bf16().lease(Device::flex()).unwrap()
}

/// Numbers to 10, with more digits than bf16 has.
fn scores(device: &Device) -> Tensor<2> {
    let ramp = Tensor::<1, Int>::arange(0..48, device).float();
    ((ramp * 0.71).cos() * 10.0).reshape([6, 8]).require_grad()
}

/// Softmax of low logits is computed in f32 as PyTorch does, though Burn sends it as its parts. To the bit that of a program
/// that casts by hand, and so are its gradients.
#[test]
fn softmax_of_low_logits_is_that_of_f32() {
    type Apply = fn(Tensor<2>) -> Tensor<2>;
    let cases: [(&str, Apply); 5] = [
        ("softmax", |x| activation::softmax(x, 1)),
        ("log_softmax", |x| activation::log_softmax(x, 1)),
        ("softmin", |x| activation::softmin(x, 1)),
        ("quiet_softmax", |x| activation::quiet_softmax(x, 1)),
        ("cross_entropy", |x| {
            let classes = Tensor::<1, Int>::arange(0..6, &x.device());
            let loss = CrossEntropyLossConfig::new().init(&x.device());
            loss.forward(x, classes).reshape([1, 1])
        }),
    ];
    for (name, apply) in cases {
        let run = |device: Device, lower: Apply| {
            let x = scores(&device.autodiff());
            let y = apply(lower(x.clone()));
            let grads = y.clone().slice([0..1, 0..1]).sum().backward();
            (values(y), values(x.grad(&grads).unwrap()))
        };
        let low = run(Autocast::bf16().device(Device::flex()).unwrap(), |x| {
            let eye = Tensor::eye(8, &x.device());
            x.matmul(eye)
        });
        let hand = run(Device::flex(), |x| {
            x.cast(FloatDType::BF16).cast(FloatDType::F32)
        });
        assert_eq!(low, hand, "{name}");
    }
}

/// The gradients of `tensors` are stored in f32, as an op on each tells that runs as its input is stored.
fn assert_stored_in_f32(device: &AutocastLease, grads: &Gradients, tensors: [Tensor<2>; 2]) {
    let count = || {
        let report = device.report();
        [DType::F32, DType::BF16].map(|dtype| report.runs_of(Op::float_abs, dtype))
    };
    let [full, low] = count();
    for tensor in tensors {
        tensor.grad(grads).unwrap().abs().into_data();
    }
    assert_eq!(count(), [full + 2, low]);
}

/// A parameter's gradient is stored in f32 wherever the parameter stands, so that an optimizer's moments are.
#[test]
fn gradients_of_parameters_are_stored_in_f32() {
    let device = bf16();
    let autodiff = device.device().autodiff();
    let random = || Tensor::<2>::random([4, 4], Distribution::Default, &autodiff);
    let low = || random().matmul(random());
    let parameter = || random().require_grad();

    // On the left, and on both sides of what is low.
    let (left, right) = (parameter(), parameter());
    let loss = left.clone().matmul(low()).matmul(right.clone()).sum();
    assert_stored_in_f32(&device, &loss.backward(), [left, right]);

    // Element by element.
    let (times, plus) = (parameter(), parameter());
    let y = low() * times.clone();
    let loss = (y.matmul(random()) + plus.clone()).matmul(random()).sum();
    assert_stored_in_f32(&device, &loss.backward(), [times, plus]);

    // Sums of what comes from several places.
    let embedding = EmbeddingConfig::new(4, 4).init(&autodiff);
    let linear = LinearConfig::new(4, 4).init(&autodiff);
    let ids = Tensor::<2, Int>::zeros([2, 3], &autodiff);
    let loss = linear
        .forward(embedding.forward(ids))
        .matmul(random().unsqueeze())
        .sum();
    let weights = [embedding.weight.val(), linear.weight.val()];
    assert_stored_in_f32(&device, &loss.backward(), weights);

    let conv = Conv2dConfig::new([1, 2], [3, 3]).init(&autodiff);
    let image = parameter();
    let loss = conv.forward(image.clone().reshape([1, 1, 4, 4])).sum();
    let grads = loss.backward();
    assert_stored_in_f32(&device, &grads, [image.clone(), image]);
}

/// The gradient of what is low stays low, which is half of what backward moves.
#[test]
fn gradients_of_activations_stay_low() {
    let device = bf16();
    let autodiff = device.device().autodiff();
    let random = || Tensor::<2>::random([4, 4], Distribution::Default, &autodiff);
    let x = random().require_grad();
    // Forward and backward of a flip are flips.
    let loss = x.clone().matmul(random()).flip([0]).matmul(random()).sum();
    loss.backward();
    device.device().sync().unwrap();
    assert_eq!(device.report().runs_of(Op::float_flip, DType::BF16), 2);
}

#[test]
fn a_convolution_in_f32_has_its_backward_in_f32() {
    let policy = Policy::builder(FloatDType::BF16).rule(Op::conv2d, Rule::Full);
    let autocast = Autocast::new(policy.build());
    let device = autocast.lease(Device::flex()).unwrap();
    let autodiff = device.device().autodiff();
    let conv = Conv2dConfig::new([1, 2], [3, 3]).init(&autodiff);
    let image = Tensor::<4>::random([1, 1, 4, 4], Distribution::Default, &autodiff);
    conv.forward(image.require_grad()).sum().backward();
    device.device().sync().unwrap();
    let report = device.report();
    for op in Op::conv2d.backward().chain([Op::conv2d]) {
        assert_eq!(report.runs_of(op, DType::F32), 1, "{op}");
    }
}
