//! What a program can see on an autocast device is what it sees on the plain one.

use super::alone::alone;
use burn::{
    module::Module,
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::{AdamConfig, GradientsParams, ModuleOptimizer},
    store::ModuleRecord,
    tensor::{
        Bool, DType, Device, Distribution, FloatDType, Int, Shape, Tensor, TensorData,
        activation::{relu, softmax},
    },
};
use burn_amp::{Autocast, Op, Policy};
use burn_layer::ops_come_whole;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn bf16() -> Device {
    Autocast::bf16().device(Device::flex()).unwrap()
}

/// A third is in no binary format, and a rounding more or less is seen.
fn thirds<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let values = (0..shape.iter().product::<usize>()).map(|place| (place as f32 - 7.0) / 3.0);
    Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), shape), device)
}

/// The same, stored in the low dtype where there is one.
fn low<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let columns = shape[D - 1];
    let rows = thirds(shape, device).reshape([shape.iter().product::<usize>() / columns, columns]);
    rows.matmul(Tensor::eye(columns, device)).reshape(shape)
}

fn relative_error<const D: usize>(low: Tensor<D>, exact: Tensor<D>) -> f32 {
    let (low, exact) = (
        low.to_device(&Device::flex()),
        exact.to_device(&Device::flex()),
    );
    let squares = |x: Tensor<D>| (x.clone() * x).sum().into_scalar::<f32>();
    (squares(low - exact.clone()) / squares(exact)).sqrt()
}

/// Whatever the storage, dtypes and shapes are the plain device's: of floats, of what is computed
/// from them, and of what is read back.
#[test]
fn dtypes_and_shapes_are_the_plain_devices() {
    type Seen = (DType, Shape);
    let run = |device: &Device| -> Vec<(Seen, Seen)> {
        let x = low([4, 6], device);
        let floats = [
            x.clone(),
            x.clone().exp(),
            x.clone().matmul(x.clone().transpose()),
            softmax(x.clone(), 1),
            x.clone().sum_dim(0),
            x.clone() + thirds([4, 6], device),
            Tensor::cat(vec![x.clone(), thirds([4, 6], device)], 1),
            x.clone().cast(FloatDType::F16),
            x.clone().cast(FloatDType::BF16) * 2.0,
            x.clone().cast(FloatDType::F16).exp(),
            x.clone().cast(FloatDType::F64),
            x.clone().slice([1..3, 0..2]),
        ];
        let ints = [x.clone().argmax(1), x.clone().int(), x.clone().argsort(1)];
        let bools = [
            x.clone().greater_scalar(0.0),
            x.clone().equal(x.clone()),
            x.is_nan(),
        ];

        let mut seen = Vec::new();
        for float in floats {
            let visible = (float.dtype(), float.shape());
            let data = float.into_data();
            seen.push((visible, (data.dtype(), data.shape().clone())));
        }
        for int in ints {
            let visible = (int.dtype(), int.shape());
            let data = int.into_data();
            seen.push((visible, (data.dtype(), data.shape().clone())));
        }
        for bool in bools {
            let visible = (bool.dtype(), bool.shape());
            let data = bool.into_data();
            seen.push((visible, (data.dtype(), data.shape().clone())));
        }
        seen
    };
    assert_eq!(run(&bf16()), run(&Device::flex()));
}

/// What goes in comes out again, in every float dtype.
#[test]
fn data_comes_back_as_it_was() {
    let device = bf16();
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let data = TensorData::from([1.0f64 / 3.0, -7e-30, 6e4, 0.0]).convert_dtype(dtype);
        let tensor = Tensor::<1>::from_data(data.clone(), (&device, dtype));
        assert_eq!(tensor.dtype(), dtype);
        assert_eq!(tensor.into_data(), data);
    }
}

/// Integers and booleans have no precision to lose.
#[test]
fn int_and_bool_ops_are_the_plain_devices() {
    let run = |device: &Device| {
        let ints = Tensor::<1, Int>::arange(-6..6, device).reshape([3, 4]);
        let other = Tensor::<2, Int>::full([3, 4], 5, device);
        let bools = ints.clone().greater_scalar(1);
        let picked = Tensor::<1, Int>::from_ints([2, 0], device);
        let ints_out: Vec<Tensor<2, Int>> = vec![
            ints.clone() * other.clone() - 3,
            ints.clone() / 4,
            ints.clone().remainder_scalar(5),
            ints.clone().matmul(other.clone().transpose()),
            ints.clone().sum_dim(1),
            ints.clone().prod_dim(0),
            ints.clone().max_dim(1),
            ints.clone().argmin(0),
            ints.clone().sort_descending(1),
            ints.clone().cumsum(1),
            ints.clone().select(0, picked),
            ints.clone().flip([1]).clamp(-2, 3),
            ints.clone().mask_fill(bools.clone(), 9),
            ints.clone().bitwise_and(other),
            bools.clone().int(),
            // 2^24 + 1 is no f32 number.
            Tensor::full([1, 1], 16_777_217, device) + 2,
        ];
        let bools_out: Vec<Tensor<2, Bool>> = vec![
            bools.clone().bool_not(),
            bools.clone().bool_and(ints.clone().lower_scalar(4)),
            bools.clone().transpose(),
            ints.equal_scalar(3),
            bools.any_dim(1),
        ];
        let ints_out = ints_out.into_iter().map(Tensor::into_data);
        let bools_out = bools_out.into_iter().map(Tensor::into_data);
        ints_out.chain(bools_out).collect::<Vec<_>>()
    };
    assert_eq!(run(&bf16()), run(&Device::flex()));
}

/// The same seed, the same numbers, whatever draws them.
#[test]
fn seeds_draw_what_they_draw_on_the_plain_device() {
    alone(
        "suite::transparent::seeds_draw_what_they_draw_on_the_plain_device",
        || {
            let draw = |device: &Device| {
                device.seed(42);
                let mut drawn: Vec<TensorData> = [
                    Distribution::Default,
                    Distribution::Uniform(-3.0, 2.0),
                    Distribution::Normal(1.0, 2.0),
                    Distribution::Bernoulli(0.3),
                ]
                .into_iter()
                .map(|one| Tensor::<2>::random([3, 5], one, device).into_data())
                .collect();
                let like = low([2, 4], device).random_like(Distribution::Default);
                drawn.push(like.into_data());
                let ints = Distribution::Uniform(0.0, 100.0);
                drawn.push(Tensor::<1, Int>::random([8], ints, device).into_data());
                let linear = LinearConfig::new(4, 3).init(device);
                drawn.push(linear.weight.val().into_data());
                drawn
            };
            let plain = draw(&Device::flex());
            assert_eq!(draw(&bf16()), plain);
            assert_eq!(
                draw(&Autocast::fp16().device(Device::flex()).unwrap()),
                plain
            );
        },
    );
}

#[test]
fn devices_are_equal_when_they_are_the_same() {
    let device = bf16();
    let other = Autocast::fp16().device(Device::flex()).unwrap();
    assert_eq!(device, device.clone());
    assert_eq!(device, device.clone().autodiff());
    assert_eq!(thirds([2], &device).device(), device);
    assert_eq!(low([2, 2], &device).device(), device);
    let devices = LinearConfig::new(2, 2).init(&device).devices();
    assert_eq!(devices, std::slice::from_ref(&device));
    assert_ne!(device, other);
    assert_ne!(device, Device::flex());
    assert!(device.clone().autodiff().is_autodiff() && !device.is_autodiff());
}

/// From the plain device and back, and between autocast devices of different policies.
#[test]
fn tensors_move_between_devices_and_keep_their_values() {
    let (plain, bf16) = (Device::flex(), bf16());
    let fp16 = Autocast::fp16().device(Device::flex()).unwrap();
    let x = thirds([3, 5], &plain);
    let there = x.clone().to_device(&bf16);
    assert_eq!(there.device(), bf16);
    let on = there.clone().to_device(&fp16);
    assert_eq!(on.device(), fp16);
    let back = on.to_device(&plain);
    assert_eq!(back.device(), plain);
    assert_eq!(back.into_data(), x.clone().into_data());
    assert_eq!(there.into_data(), x.into_data());

    // What is stored low arrives in f32, as the program believes it is.
    let stored_low = low([3, 5], &bf16);
    for device in [&plain, &fp16] {
        let moved = stored_low.clone().to_device(device);
        assert_eq!(moved.dtype(), DType::F32);
        assert_eq!(moved.into_data(), stored_low.clone().into_data());
    }
    let ints = Tensor::<1, Int>::arange(0..4, &bf16).to_device(&plain);
    assert_eq!(
        ints.into_data(),
        Tensor::<1, Int>::arange(0..4, &plain).into_data()
    );
    let bools = Tensor::<1, Int>::arange(0..4, &plain).greater_scalar(1);
    let moved = bools.clone().to_device(&bf16);
    assert_eq!(moved.into_data(), bools.into_data());
}

/// The client by which Burn 0.22 reaches served devices has no quantized tensors: quantize on the
/// plain device. When this test fails, Burn has them, and they are to be tested here.
#[test]
fn quantized_tensors_are_beyond_served_devices() {
    let scheme = Device::flex().settings().quantization.scheme;
    let quantize = |device: Device| {
        let quantized = thirds([8, 32], &device).quantize_dynamic(&scheme);
        quantized.dequantize().into_data()
    };
    quantize(Device::flex());
    let autocast = Autocast::bf16().lease(Device::flex()).unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| quantize(autocast.device()))).unwrap_err();
    // With Burn's own fusion it is the read that fails, for another reason.
    if ops_come_whole() {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied());
        assert!(
            said.is_some_and(|said| said.contains("not implemented")),
            "{said:?}"
        );
    }
}

/// A model trained on the autocast device, its optimizer too: the bytes of its records are what
/// the plain device makes of the same values, and each loads the other's.
#[test]
fn records_are_byte_compatible_both_ways() {
    let device = bf16().autodiff();
    // One parameter, since Burn writes an optimizer's parameters in no order.
    let config = LinearConfig::new(6, 3).with_bias(false);
    let mut model = config.init(&device);
    let mut optim = AdamConfig::new().init();
    for _ in 0..2 {
        let loss = model.forward(low([4, 6], &device)).powi_scalar(2).mean();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.1, model, grads);
    }
    let written = model.clone().into_record().into_bytes().unwrap();
    let plain = Device::flex().autodiff();
    let load = |bytes, device: &Device| {
        let record = ModuleRecord::from_bytes(bytes).unwrap();
        config.init(device).load_record(record)
    };
    let loaded = load(written.clone(), &plain);
    let rewritten = loaded.clone().into_record().into_bytes().unwrap();
    assert!(rewritten == written, "the plain device writes other bytes");
    let back = load(rewritten, &device).into_record().into_bytes().unwrap();
    assert!(back == written, "the way back changes bytes");

    // The optimizers write the same, and step on from each other's state.
    let written = optim.into_bytes().unwrap();
    let resumed = AdamConfig::new()
        .init()
        .from_bytes(written.clone())
        .unwrap();
    assert!(resumed.into_bytes().unwrap() == written);
    let step = |mut optim: ModuleOptimizer, model: Linear, device: &Device| {
        // A gradient without rounding, so that the step is the same on both.
        let loss = (model.weight.val() * thirds([6, 3], device)).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        optim.step(0.1, model, grads).weight.val().into_data()
    };
    let on = step(resumed, loaded, &plain);
    assert_eq!(on, step(optim, model, &device));
}

/// Running statistics are stored in f32, as an op on them tells that runs as they are stored, and near the plain device's.
#[test]
fn running_statistics_are_kept_in_f32() {
    let run = |device: Device| {
        let device = device.autodiff();
        let norm: BatchNorm = BatchNormConfig::new(3).init(&device);
        for _ in 0..3 {
            let _ = relu(norm.forward(low([4, 3, 5], &device)));
        }
        let norm = norm.valid();
        (norm.running_mean.value(), norm.running_var.value())
    };
    let autocast = Autocast::bf16().lease(Device::flex()).unwrap();
    let (mean, variance) = run(autocast.device());
    for statistic in [&mean, &variance] {
        statistic.clone().abs().into_data();
    }
    let stored = |dtype| autocast.report().runs_of(Op::float_abs, dtype);
    assert_eq!((stored(DType::F32), stored(DType::BF16)), (2, 0));
    let (plain_mean, plain_variance) = run(Device::flex());
    assert_eq!((mean.dtype(), variance.dtype()), (DType::F32, DType::F32));
    for (low, exact) in [(mean, plain_mean), (variance, plain_variance)] {
        let error = relative_error(low, exact);
        assert!(error < 1.0 / 128.0, "{error}");
    }
}

/// O0 computes what the plain device computes, bit for bit.
#[test]
fn o0_is_the_plain_device() {
    let autocast = Autocast::new(Policy::o0()).lease(Device::flex()).unwrap();
    let run = |device: &Device| {
        let product = low([4, 6], device).matmul(thirds([6, 3], device));
        match ops_come_whole() {
            true => softmax(product, 1).into_data(),
            // In parts it is rounded more often.
            false => product.tanh().into_data(),
        }
    };
    assert_eq!(run(&autocast.device()), run(&Device::flex()));
    let report = autocast.report();
    assert_eq!(report.runs_of(Op::float_matmul, DType::F32), 2);
    assert_eq!(report.casts, 0);
}
