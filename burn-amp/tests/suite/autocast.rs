//! What a program sees of an autocast device, and what runs underneath.

use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::{
        LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
    },
    optim::{AdamConfig, GradientsParams},
    tensor::{DType, Device, Distribution, FloatDType, Tensor, activation},
};
use burn_amp::{Autocast, LayerError, Op, Policy, Rule};
use burn_layer::ops_come_whole;

use super::devices::devices;

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    norm: LayerNorm,
    linear: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([2, 4], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            norm: LayerNormConfig::new(64).init(device),
            linear: LinearConfig::new(64, 3).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = activation::gelu(self.conv.forward(x)).flatten::<2>(1, 3);
        self.linear.forward(self.norm.forward(x))
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
    let difference = square(&mut a.iter().zip(b).map(|(a, b)| a - b));
    (difference / square(&mut a.iter().copied())).sqrt()
}

/// Every device with those of the policies whose low dtype it has. WebGPU has no bf16.
fn policies_and_devices<const N: usize>(policies: [Policy; N]) -> Vec<(Policy, Device)> {
    let of = |device: Device| {
        policies
            .clone()
            .map(|policy| match device.supports_dtype(policy.low_dtype()) {
                true => Some((policy, device.clone())),
                false => None,
            })
    };
    devices().into_iter().flat_map(of).flatten().collect()
}

/// Has an op run on every parameter that runs as the parameter is stored.
struct Probe;
impl ModuleVisitor for Probe {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        assert_eq!(param.val().dtype(), DType::F32);
        param.val().abs().into_data();
    }
}

/// And what outlives a step is f32 underneath.
#[test]
fn the_program_sees_f32() {
    for (policy, plain) in policies_and_devices([Policy::bf16(), Policy::fp16(), Policy::o2()]) {
        let low = DType::from(policy.low_dtype());
        let autocast = Autocast::new(policy).lease(plain).unwrap();
        let device = autocast.device().autodiff();
        let mut net = Net::new(&device);
        let mut optim = AdamConfig::new().init();
        for _ in 0..2 {
            let x = Tensor::random([4, 2, 4, 4], Distribution::Default, &device);
            let out = net.forward(x);
            assert_eq!(out.dtype(), DType::F32);
            assert_eq!(out.to_data().dtype(), DType::F32);
            let grads = GradientsParams::from_grads(out.powi_scalar(2).mean().backward(), &net);
            let grad = grads.get::<2>(net.linear.weight.id).unwrap();
            assert_eq!(
                (grad.dtype(), grad.into_data().dtype()),
                (DType::F32, DType::F32)
            );
            let squares = |dtype| autocast.report().runs_of(Op::float_mul_scalar, dtype);
            let before = squares(low);
            net = optim.step(1e-3, net, grads);
            device.sync().unwrap();
            // Gradients and moments are what an optimizer multiplies by its factors.
            assert_eq!(squares(low), before);
        }
        net.visit(&mut Probe);
        let report = autocast.report();
        let parameters = [DType::F32, low].map(|dtype| report.runs_of(Op::float_abs, dtype));
        assert_eq!(parameters, [6, 0]);
    }
}

/// Burn sums the gradient of a bias over rows, which makes it f32, but does not where there is one row.
#[test]
fn the_gradient_of_a_bias_is_f32_with_one_row_too() {
    let policies = [Policy::bf16(), Policy::fp16(), Policy::o2(), Policy::o3()];
    for (policy, plain) in policies_and_devices(policies) {
        let autocast = Autocast::new(policy.clone()).lease(plain).unwrap();
        let device = autocast.device().autodiff();
        let hidden = LinearConfig::new(3, 4).init(&device);
        let output = Param::from_tensor(Tensor::<2>::ones([4, 1], &device));
        for rows in [1, 2] {
            let x = hidden.forward(Tensor::<2>::ones([rows, 3], &device));
            let gradients = x.matmul(output.val()).sum().backward();
            let bias = hidden.bias.as_ref().unwrap();
            let gradient = bias.grad(&gradients).unwrap();
            let before = autocast.report().runs_of(Op::float_abs, DType::F32);
            gradient.clone().abs().into_data();
            let after = autocast.report().runs_of(Op::float_abs, DType::F32);
            assert_eq!(after - before, 1, "{} {rows}", policy.name());
            // 16 bits hold no more than 256 or 2048 of them.
            let sum = (0..12).fold(gradient, |sum, _| sum.clone() + sum) + rows as f32;
            assert_eq!(values(sum), [4097.0 * rows as f32; 4]);
        }
    }
}

/// Heads that are moved before tokens are no transposition, as which a gradient of a weight is known.
#[test]
fn scores_of_attention_are_stored_low() {
    let autocast = Autocast::bf16().lease(Device::flex()).unwrap();
    let low = |product: &dyn Fn(Tensor<4>) -> Tensor<4>| {
        let tokens = Tensor::<4>::ones([2, 4, 3, 8], &autocast.device());
        let before = autocast.report().low_bytes;
        product(tokens.swap_dims(1, 2)).into_data();
        autocast.report().low_bytes - before
    };
    assert_eq!(low(&|x| x.clone().matmul(x.transpose())), 2 * 3 * 4 * 4 * 2);
    assert_eq!(low(&|x| x.clone().transpose().matmul(x)), 0);
}

/// Outputs and gradients are those of f32 within the precision of the low dtype.
#[test]
fn outputs_and_gradients_are_near_those_of_f32() {
    let record = Net::new(&Device::flex())
        .into_record()
        .into_bytes()
        .unwrap();
    let run = |device: Device| {
        let device = device.autodiff();
        let record = burn::store::ModuleRecord::from_bytes(record.clone()).unwrap();
        let net = Net::new(&device).load_record(record);
        let ramp = Tensor::<1, burn::tensor::Int>::arange(0..128, &device).float();
        let x = (ramp * 0.37).sin().reshape([4, 2, 4, 4]);
        let out = net.forward(x);
        let grads = out.clone().powi_scalar(2).mean().backward();
        let weight = values(net.conv.weight.grad(&grads).unwrap());
        (
            values(out),
            weight,
            values(net.linear.weight.grad(&grads).unwrap()),
        )
    };
    // Half a unit in the last place is 2^-9 for bf16, 2^-12 for fp16; a few ops add up.
    for (policy, plain) in policies_and_devices([Policy::o0(), Policy::fp16(), Policy::bf16()]) {
        let tolerance = match policy.low_dtype() {
            // Burn's own derivative of `gelu` is another function than Flex's.
            FloatDType::F32 if !ops_come_whole() => 1e-3,
            FloatDType::F32 if plain == Device::flex() => 1e-6,
            // Kernels that were measured anew may sum in another order.
            FloatDType::F32 => 1e-5,
            FloatDType::F16 => 4e-3,
            _ => 3e-2,
        };
        let exact = run(plain.clone());
        let lease = Autocast::new(policy.clone()).lease(plain.clone()).unwrap();
        let low = run(lease.device());
        for (exact, low) in [(&exact.0, &low.0), (&exact.1, &low.1), (&exact.2, &low.2)] {
            let distance = distance(exact, low);
            assert!(distance < tolerance, "{policy:?} on {plain:?}: {distance}");
        }
    }
}

/// The same values as a program that casts by hand, bit for bit.
#[test]
fn autocast_equals_casts_by_hand() {
    let x = |device: &Device| {
        let ramp = Tensor::<1, burn::tensor::Int>::arange(0..48, device).float();
        (ramp * 0.71).cos().reshape([6, 8])
    };
    let device = Autocast::bf16().device(Device::flex()).unwrap();
    let low = x(&device);
    let low = activation::softmax(low.clone().matmul(low.transpose()), 1);

    let (bf16, f32) = (FloatDType::BF16, FloatDType::F32);
    let plain = match ops_come_whole() {
        true => Device::flex(),
        // Which makes a softmax of the same parts.
        false => Autocast::new(Policy::o0()).device(Device::flex()).unwrap(),
    };
    let hand = x(&plain).cast(bf16);
    let hand = activation::softmax(hand.clone().matmul(hand.transpose()).cast(f32), 1);
    assert_eq!(values(low), values(hand));
}

#[test]
fn a_parameter_is_cast_once_a_step() {
    let autocast = Autocast::bf16().lease(Device::flex()).unwrap();
    let weight = Tensor::<2>::ones([4, 4], &autocast.device());
    weight.clone().into_data();
    let before = autocast.report();
    let mut out = weight.clone();
    for _ in 0..5 {
        out = out.matmul(weight.clone());
    }
    out.into_data();
    let report = autocast.report();
    assert_eq!(report.runs_of(Op::float_matmul, DType::BF16), 5);
    // The weight twice in the first product, then once a product, but a single cast of it; and
    // what is read back is cast to f32.
    assert_eq!(report.casts - before.casts, 2);
    assert_eq!(report.cast_elements - before.cast_elements, 2 * 16);
    assert_eq!(report.casts_saved - before.casts_saved, 5);
}

/// So is an activation for all products that its rows are in, in backward too: by queries, keys and values, for instance.
#[test]
fn reshapes_and_transpositions_share_a_cast() {
    let autocast = Autocast::bf16().lease(Device::flex()).unwrap();
    let products = |device: &Device, dtype: FloatDType| {
        let ramp = Tensor::<1, burn::tensor::Int>::arange(0..24, device).float();
        let [x, y] = [0.71, 0.37].map(|step| (ramp.clone() * step).cos().reshape([2, 3, 4]));
        let (x, y) = (x.cast(dtype), y.cast(dtype));
        device.sync().unwrap();
        let before = autocast.report();
        let flat = |tensor: &Tensor<3>| tensor.clone().reshape([6, 4]);
        let first = flat(&x).matmul(y.clone().reshape([4, 6]));
        let second = flat(&x).matmul(flat(&y).transpose());
        let third = flat(&x).transpose().matmul(flat(&y));
        device.sync().unwrap();
        let after = autocast.report();
        (
            [first, second, third].map(|product| values(product.cast(FloatDType::F32))),
            after.casts - before.casts,
            after.casts_saved - before.casts_saved,
        )
    };
    let (expected, ..) = products(&Device::flex(), FloatDType::BF16);
    let (found, casts, saved) = products(&autocast.device(), FloatDType::F32);
    assert_eq!(found, expected);
    // And the third product, which may be the gradient of a weight, is stored in f32.
    assert_eq!((casts, saved), (3, 4));
}

/// In PyTorch a linear layer is low with its bias, and what a program adds to a product is promoted.
#[test]
fn a_linear_layer_is_low_with_its_bias() {
    for batch in [1, 2] {
        let autocast = Autocast::bf16().lease(Device::flex()).unwrap();
        let adds = |dtype| autocast.report().runs_of(Op::float_add, dtype);
        let x = |device: &Device| {
            let ramp = Tensor::<1, burn::tensor::Int>::arange(0..48, device).float();
            (ramp * 0.71).cos().reshape([2, 3, 8]).slice(0..batch)
        };
        let (device, low) = (Device::flex(), FloatDType::BF16);
        let linear = LinearConfig::new(8, 4).init(&device);
        let there = linear.clone().fork(&autocast.device());
        let hand = burn::tensor::module::linear(
            x(&device).cast(low),
            linear.weight.val().cast(low),
            linear.bias.as_ref().map(|bias| bias.val().cast(low)),
        );
        let out = there.forward(x(&autocast.device()));
        assert_eq!(values(out.clone()), values(hand.cast(FloatDType::F32)));
        assert_eq!([adds(DType::BF16), adds(DType::F32)], [1, 0]);
        (out.clone() + Tensor::ones(out.dims(), &autocast.device())).into_data();
        assert_eq!([adds(DType::BF16), adds(DType::F32)], [1, 1]);
    }
    let policy = Policy::builder(FloatDType::BF16).rule(Op::float_matmul, Rule::Full);
    let full = Autocast::new(policy.build()).lease(Device::flex()).unwrap();
    let linear = LinearConfig::new(8, 4).init(&full.device());
    linear
        .forward(Tensor::<2>::ones([3, 8], &full.device()))
        .into_data();
    assert_eq!(full.report().runs(DType::BF16), 0);
}

/// A gradient of 2^-20 times one of 2^-20 is nothing in fp16: gradients of weights are kept in f32,
/// whether the weight was used in a `linear` or in a plain product.
#[test]
fn gradients_of_weights_are_kept_in_f32() {
    let cases = devices()
        .into_iter()
        .flat_map(|it| [true, false].map(|bias| (it.clone(), bias)));
    for (plain, bias) in cases {
        let device = Autocast::fp16().device(plain).unwrap().autodiff();
        let linear = LinearConfig::new(2, 1).with_bias(bias).init(&device);
        let x = Tensor::<2>::from_floats([[0.00390625, 0.5]], &device);
        let grads = linear.forward(x).mul_scalar(1.0 / 4096.0).sum().backward();
        let grad = linear.weight.grad(&grads).unwrap();
        let square = values(grad.clone() * grad);
        assert_eq!(square, [2f32.powi(-40), 2f32.powi(-26)], "bias: {bias}");
    }
}

/// O2 stores what norms and softmax give in the low dtype, and sums in f32 all the same.
#[test]
fn o2_keeps_activations_low_and_sums_full() {
    if !ops_come_whole() {
        return println!("SKIPPED: with Burn's own fusion, its client sends this op in parts");
    }
    let casts = |policy: Policy, plain: &Device| {
        let autocast = Autocast::new(policy).lease(plain.clone()).unwrap();
        let x = Tensor::<2>::ones([8, 8], &autocast.device());
        let low = x.clone().matmul(x);
        activation::softmax(low.clone(), 1).abs().into_data();
        low.sum_dim(0).abs().into_data();
        let report = autocast.report();
        (
            report.runs_of(Op::float_abs, DType::F16),
            report.runs_of(Op::float_abs, DType::F32),
        )
    };
    for plain in devices() {
        assert_eq!(casts(Policy::o1(), &plain), (0, 2));
        assert_eq!(casts(Policy::o2(), &plain), (1, 1));
    }
}

#[test]
fn the_report_counts_ops_by_dtype() {
    let autocast = Autocast::fp16().lease(Device::flex()).unwrap();
    let x = Tensor::<2>::ones([3, 3], &autocast.device());
    x.clone().matmul(x.clone()).exp().into_data();
    (x.clone() + x).into_data();
    let report = autocast.report();
    assert_eq!(report.runs_of(Op::float_matmul, DType::F16), 1);
    assert_eq!(report.runs_of(Op::float_exp, DType::F32), 1);
    assert_eq!(report.runs_of(Op::float_add, DType::F32), 1);
    assert_eq!(report.runs(DType::F16), 1);
    let matmul = report.ops.iter().find(|count| count.op == Op::float_matmul);
    assert_eq!(matmul.unwrap().total(), 1);
    assert!(report.to_string().contains("float_matmul"), "{report}");
}

#[test]
fn policies_live_side_by_side() {
    let policy = Policy::builder(FloatDType::BF16)
        .rule(Op::float_exp, Rule::Lower)
        .build();
    let own = Autocast::new(policy).lease(Device::flex()).unwrap();
    let preset = Autocast::bf16().device(Device::flex()).unwrap();
    let x: f32 = 1.0 + 1.0 / 1024.0;
    let exp = |device: &Device| values(Tensor::<1>::from_floats([x], device).exp())[0];
    assert!((exp(&preset) - x.exp()).abs() < 1e-6);
    assert_ne!(exp(&own.device()), exp(&preset));
}

#[test]
fn float64_is_left_alone() {
    let device = Autocast::bf16().device(Device::flex()).unwrap();
    let x = Tensor::<2>::from_floats([[1.0]], &device).cast(DType::F64);
    let y = x.clone().div_scalar(3.0).matmul(x);
    assert_eq!(y.dtype(), DType::F64);
    assert_eq!(y.into_data().try_to_vec::<f64>().unwrap(), [1.0 / 3.0]);
}

/// Records are those of plain Burn, both ways.
#[test]
fn records_are_interchangeable() {
    let device = Autocast::bf16().device(Device::flex()).unwrap();
    let low = Net::new(&device);
    let weight = values(low.linear.weight.val());
    let record = low.into_record().into_bytes().unwrap();
    let plain = Net::new(&Device::flex())
        .load_record(burn::store::ModuleRecord::from_bytes(record.clone()).unwrap());
    assert_eq!(values(plain.linear.weight.val()), weight);
    let back = Net::new(&device).load_record(
        burn::store::ModuleRecord::from_bytes(plain.into_record().into_bytes().unwrap()).unwrap(),
    );
    assert_eq!(values(back.linear.weight.val()), weight);
}

#[test]
fn a_device_that_cannot_carry_a_layer_is_refused() {
    let device = Autocast::bf16().device(Device::flex()).unwrap();
    let error = Autocast::bf16().device(device).unwrap_err();
    assert!(matches!(error, LayerError::AlreadyServed { .. }), "{error}");
}
