//! Regions: forward and backward at the precision that the region asks for.

use burn::{
    module::Param,
    nn::{Linear, LinearConfig},
    tensor::{DType, Device, Distribution, FloatDType, Tensor, TensorData},
};
use burn_amp::{
    Autocast, AutocastLease, Fp8Filter, Op, Policy, autocast, full_precision, named,
    recipe::CurrentScaling,
};

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

fn bf16() -> AutocastLease {
    Autocast::bf16().lease(Device::flex()).unwrap()
}

fn data(shape: [usize; 2]) -> TensorData {
    Tensor::<2>::random(shape, Distribution::Default, &Device::flex()).into_data()
}

#[test]
fn regions_nest_and_end() {
    let device = bf16();
    let x = Tensor::<2>::from_data(data([4, 4]), &device.device());
    let product = || x.clone().matmul(x.clone()).into_data();
    let count = || {
        let report = device.report();
        [DType::F16, DType::BF16, DType::F32].map(|dtype| report.runs_of(Op::float_matmul, dtype))
    };
    full_precision(|| {
        product();
        assert_eq!(count(), [0, 0, 1]);
        autocast(&Policy::fp16(), product);
        assert_eq!(count(), [1, 0, 1]);
        autocast(&Policy::bf16(), || full_precision(product));
        assert_eq!(count(), [1, 0, 2]);
        product();
        assert_eq!(count(), [1, 0, 3]);
    });
    product();
    assert_eq!(count(), [1, 1, 3]);
}

#[test]
fn a_region_is_its_threads() {
    let device = bf16();
    let x = Tensor::<2>::from_data(data([4, 4]), &device.device());
    full_precision(|| {
        let x = x.clone();
        let other = std::thread::spawn(move || x.clone().matmul(x).into_data());
        other.join().unwrap();
    });
    assert_eq!(device.report().runs_of(Op::float_matmul, DType::BF16), 1);
}

/// Also of what came from outside in bf16.
#[test]
fn a_policy_that_is_off_is_full_precision() {
    let device = bf16();
    let x = Tensor::<2>::from_data(data([4, 4]), &device.device());
    let low = x.clone().matmul(x);
    let product = || values(low.clone().matmul(low.clone()) * 3.0);
    let [off, full] = [autocast(&Policy::o0(), product), full_precision(product)];
    assert_eq!(off, full);
    let report = device.report();
    assert_eq!(report.runs_of(Op::float_matmul, DType::F32), 2);
    assert_eq!(report.runs_of(Op::float_matmul, DType::BF16), 1);
}

/// What is stored low is computed in f32 inside a region, as if cast by hand.
#[test]
fn a_region_casts_what_came_from_outside() {
    let device = Autocast::bf16().device(Device::flex()).unwrap();
    let x = data([4, 4]);
    let low = Tensor::<2>::from_data(x.clone(), &device);
    let low = low.clone().matmul(low);
    let inside = full_precision(|| low.clone().matmul(low) * 3.0);

    let hand = Tensor::<2>::from_data(x, &Device::flex()).cast(FloatDType::BF16);
    let hand = hand.clone().matmul(hand).cast(FloatDType::F32);
    assert_eq!(values(inside), values(hand.clone().matmul(hand) * 3.0));
}

fn linear(weight: &TensorData, bias: Option<&TensorData>, device: &Device) -> Linear {
    let param = |data: &TensorData| Tensor::from_data(data.clone(), device);
    let mut linear = LinearConfig::new(6, 6)
        .with_bias(bias.is_some())
        .init(device);
    linear.weight = Param::from_tensor(param(weight).require_grad());
    linear.bias = bias.map(|bias| {
        let bias = Tensor::<2>::from_data(bias.clone(), device);
        Param::from_tensor(bias.reshape([6]).require_grad())
    });
    linear
}

/// `first` in f32, `second` in bf16; backward outside of every region. The gradients are to the bit
/// those of the same computation with the casts written by hand.
#[test]
fn backward_runs_at_the_precision_of_its_forward() {
    for with_bias in [true, false] {
        let (x, w1, w2) = (data([5, 6]), data([6, 6]), data([6, 6]));
        let bias = data([1, 6]);
        let bias = with_bias.then_some(&bias);

        let device = bf16();
        let first = linear(&w1, bias, &device.device().autodiff());
        let second = linear(&w2, bias, &device.device().autodiff());
        let input = Tensor::<2>::from_data(x.clone(), &device.device().autodiff());
        let hidden = full_precision(|| first.forward(input));
        let grads = second.forward(hidden).sum().backward();
        let found = [&first, &second].map(|linear| values(linear.weight.grad(&grads).unwrap()));

        let plain = Device::flex().autodiff();
        let first = linear(&w1, bias, &plain);
        let second = linear(&w2, bias, &plain);
        let low = |tensor: Tensor<2>| tensor.cast(FloatDType::BF16);
        let hidden = first.forward(Tensor::<2>::from_data(x, &plain));
        let mut out = low(hidden).matmul(low(second.weight.val()));
        if let Some(bias) = &second.bias {
            out = out + low(bias.val().reshape([1, 6]));
        }
        let grads = out.cast(FloatDType::F32).sum().backward();
        let hand = [&first, &second].map(|linear| values(linear.weight.grad(&grads).unwrap()));

        assert_eq!(found[0], hand[0], "of the region, bias: {with_bias}");
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= b.abs() / 128.0;
        let ok = found[1].iter().zip(&hand[1]).all(close);
        assert!(
            ok,
            "outside, bias: {with_bias}: {:?} {:?}",
            found[1], hand[1]
        );
        // The gradient of the outer weight was a bf16 product.
        let report = device.report();
        let low = [Op::linear_weight_backward, Op::float_matmul];
        assert!(low.iter().any(|op| report.runs_of(*op, DType::BF16) > 0));
    }
}

/// A whole step in one region, with a head in another.
#[test]
fn backward_in_another_region_runs_at_the_precision_of_its_forward() {
    let device = bf16();
    let autodiff = device.device().autodiff();
    let head = linear(&data([6, 6]), None, &autodiff);
    let x = Tensor::<2>::from_data(data([5, 6]), &autodiff).require_grad();
    autocast(&Policy::fp16(), || {
        let loss = full_precision(|| head.forward(x)).sum();
        loss.backward();
    });
    device.device().sync().unwrap();
    let report = device.report();
    let runs = |dtype| report.runs_of(Op::float_matmul, dtype);
    assert_eq!((runs(DType::F32), runs(DType::F16)), (3, 0));
}

/// A router in full precision beside a layer that has the same input: the gradients of their weights are each at the precision of
/// its own forward, whichever came last.
#[test]
fn weights_of_one_input_have_gradients_of_their_own_precision() {
    let (x, narrow, wide) = (data([5, 6]), data([6, 2]), data([6, 6]));
    let gradients = |device: &Device, router_first: bool| {
        let device = device.clone().autodiff();
        let on = |data: &TensorData| Tensor::<2>::from_data(data.clone(), &device);
        let [router, body] = [&narrow, &wide].map(|weight| on(weight).require_grad());
        let x = on(&x);
        let route = || full_precision(|| x.clone().matmul(router.clone())).sum();
        let run = || x.clone().matmul(body.clone()).sum();
        let loss = match router_first {
            true => {
                let routed = route();
                routed + run()
            }
            false => run() + route(),
        };
        let gradients = loss.backward();
        [router, body].map(|weight| values(weight.grad(&gradients).unwrap()))
    };
    for router_first in [true, false] {
        let exact = gradients(&Device::flex(), router_first);
        let device = Autocast::bf16().device(Device::flex()).unwrap();
        let found = gradients(&device, router_first);
        assert_eq!(found[0], exact[0], "router first: {router_first}");
        assert_ne!(found[1], exact[1], "router first: {router_first}");
    }
}

/// A head that is kept out of fp8 by name stays out in backward, though backward has a name of its own.
#[test]
fn a_filter_keeps_out_backward_in_another_block() {
    let filter = Fp8Filter::new().except_name("head");
    let autocast = Autocast::fp8(CurrentScaling::new()).unwrap();
    let device = autocast.fp8_filter(filter).lease(Device::flex()).unwrap();
    let autodiff = device.device().autodiff();
    let linear = || LinearConfig::new(16, 16).init(&autodiff);
    let (body, head) = (linear(), linear());
    let x = Tensor::<2>::ones([4, 16], &autodiff);
    let y = body.forward(x);
    let loss = named("head", || head.forward(y)).sum();
    named("step", || loss.backward());
    device.device().sync().unwrap();
    let report = device.report();
    // The body's output and the gradient of its weight, and of the head nothing.
    assert_eq!(report.fp8_runs(), 2);
    assert_eq!(report.runs_of(Op::float_matmul, DType::BF16), 3);
}

#[test]
fn equal_policies_are_one_region() {
    let device = bf16();
    let x = Tensor::<2>::from_data(data([4, 4]), &device.device());
    for _ in 0..3 {
        autocast(&Policy::fp16(), || x.clone().matmul(x.clone())).into_data();
    }
    assert_eq!(device.report().runs_of(Op::float_matmul, DType::F16), 3);
}
