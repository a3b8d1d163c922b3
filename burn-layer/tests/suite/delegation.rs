//! A layer that changes nothing against the plain backend, and plans against casts by hand.

use burn::{
    module::Module,
    nn::{
        BatchNormConfig, Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
        loss::CrossEntropyLossConfig,
        pool::MaxPool2dConfig,
    },
    optim::{GradientsParams, SgdConfig, momentum::MomentumConfig},
    tensor::{
        DType, Device, Distribution, FloatDType, Int, Tensor, TensorData, Transaction, activation,
    },
};
use burn_layer::{Inputs, Layer, Layers, Op, Plan, ops_come_whole};

use super::devices::{Leased, devices};

#[derive(Debug)]
struct Nothing;
impl Layer for Nothing {}

#[derive(Debug)]
struct LowMatmul(FloatDType);
impl Layer for LowMatmul {
    fn plan(&self, op: Op, _inputs: &Inputs) -> Option<Plan> {
        (op == Op::float_matmul).then(|| Plan::compute(self.0.into()))
    }
}

fn nothing(plain: &Device) -> Device {
    Layers::on(plain.clone()).layer(Nothing).leased()
}

/// The 16-bit floats that a device computes with: of WebGPU's there is no bf16.
fn low_dtypes(device: &Device) -> Vec<FloatDType> {
    let mut dtypes = vec![FloatDType::BF16, FloatDType::F16];
    dtypes.retain(|dtype| device.supports_dtype(*dtype));
    dtypes
}

fn data(seed: u64, shape: [usize; 2], device: &Device) -> Tensor<2> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values = (0..shape[0] * shape[1]).map(|_| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((state >> 40) as f32) / (1 << 24) as f32 - 0.5
    });
    Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), shape), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// A layered device computes what the plain device computes, bit for bit.
#[test]
fn ops_of_every_kind_agree_with_the_plain_device() {
    let run = |device: &Device| {
        let a = data(1, [6, 8], device);
        let b = data(2, [8, 5], device);
        let product = a.clone().matmul(b);
        let soft = match ops_come_whole() {
            true => activation::softmax(product.clone(), 1),
            // In parts it is rounded more often.
            false => product.clone().tanh(),
        };
        let (top, at) = product.clone().max_dim_with_indices(1);
        let mask = product.clone().greater_elem(0.1);
        let picked = product.clone().mask_fill(mask.clone(), 7.0);
        let ints = Tensor::<1, Int>::arange(0..6, device).mul_scalar(3);
        let cat = Tensor::cat(vec![a.clone(), a.clone().neg()], 1);
        let gathered = a
            .clone()
            .select(0, Tensor::<1, Int>::from_ints([4, 0, 4], device));
        let sorted = a.clone().sort(1);
        let sums = a.clone().sum_dim(0);
        let f64s = match device.supports_dtype(DType::F64) {
            true => a.cast(DType::F64).exp().cast(DType::F32),
            false => a,
        };
        let reads = Transaction::default()
            .register(soft)
            .register(top)
            .register(at)
            .register(picked)
            .register(ints)
            .register(mask)
            .register(cat)
            .register(gathered)
            .register(sorted)
            .register(sums)
            .register(f64s)
            .execute();
        reads
            .into_iter()
            .map(|data| (data.dtype(), data))
            .collect::<Vec<_>>()
    };
    for device in devices() {
        let plain = run(&device);
        let layered = run(&nothing(&device));
        assert_eq!(plain.len(), layered.len());
        for (index, (plain, layered)) in plain.into_iter().zip(layered).enumerate() {
            assert_eq!(plain, layered, "result {index} on {device:?}");
        }
    }
}

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    norm: burn::nn::BatchNorm,
    pool: burn::nn::pool::MaxPool2d,
    linear: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([3, 4], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            norm: BatchNormConfig::new(4).init(device),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            linear: LinearConfig::new(4 * 16, 10).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = activation::relu(self.norm.forward(self.conv.forward(x)));
        self.linear.forward(self.pool.forward(x).flatten(1, 3))
    }
}

/// A small network trains on the layered device as on the plain one.
#[test]
fn training_agrees_with_the_plain_device() {
    let initial = Net::new(&Device::flex())
        .into_record()
        .into_bytes()
        .unwrap();
    let train = |device: Device| {
        let device = device.autodiff();
        let mut net = Net::new(&device);
        net = net.load_record(burn::store::ModuleRecord::from_bytes(initial.clone()).unwrap());
        let mut optim = SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .init();
        let x = data(3, [8, 3 * 64], &device).reshape([8, 3, 8, 8]);
        let targets = Tensor::<1, Int>::from_ints([0, 1, 2, 3, 4, 5, 6, 7], &device);
        let mut losses = Vec::new();
        for _ in 0..4 {
            let loss = CrossEntropyLossConfig::new()
                .init(&device)
                .forward(net.forward(x.clone()), targets.clone());
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            net = optim.step(0.1, net, grads);
        }
        losses
    };
    for device in devices() {
        let plain = train(device.clone());
        let layered = train(nothing(&device));
        assert!(plain[3] < plain[0], "it learns: {plain:?}");
        for (plain, layered) in plain.iter().zip(&layered) {
            assert!((plain - layered).abs() < 1e-5, "{plain} against {layered}");
        }
    }
}

/// A plan's casts are those that a program would write, and the program does not see them.
#[test]
fn a_plan_equals_casts_by_hand() {
    let product = |device: &Device| (data(4, [7, 9], device), data(5, [9, 3], device));
    for plain in devices() {
        for low in low_dtypes(&plain) {
            let layers = Layers::on(plain.clone()).layer(LowMatmul(low));
            let (a, b) = product(&layers.leased());
            let out = a.matmul(b);
            assert_eq!(out.dtype(), DType::F32);

            let (a, b) = product(&plain);
            let expected = a.cast(low).matmul(b.cast(low)).cast(FloatDType::F32);
            assert_eq!(values(out), values(expected), "{low:?} on {plain:?}");
        }
    }
}

/// Mixed storage, as a low product meets an f32 tensor, computes in f32.
#[test]
fn mixed_storage_is_promoted() {
    for plain in devices() {
        for low in low_dtypes(&plain) {
            let layers = Layers::on(plain.clone()).layer(LowMatmul(low));
            let one = Tensor::<2>::from_floats([[1.0]], &layers.leased());
            // 1 in 16 bits plus 2^-12, which these could not hold beside 1.
            let sum = one.clone().matmul(one.clone()) + one.mul_scalar(1.0 / 4096.0);
            assert_eq!(values(sum), [1.0 + 1.0 / 4096.0]);
        }
    }
}

/// Layers stack: what the outer one leaves alone the inner one decides.
#[test]
fn layers_stack() {
    let layered = Layers::on(Device::flex())
        .layer(LowMatmul(FloatDType::BF16))
        .layer(Nothing)
        .leased();
    let x = Tensor::<2>::from_floats([[1.0 + 1.0 / 1024.0]], &layered);
    let one = Tensor::<2>::from_floats([[1.0]], &layered);
    assert_eq!(values(x.clone().matmul(one)), [1.0]);
    assert_eq!(values(x), [1.0 + 1.0 / 1024.0]);
}

/// The seed of a layered device is that of the device underneath.
#[test]
fn seeds_are_those_of_the_device() {
    let draw = |device: &Device| {
        device.seed(7);
        values(Tensor::<1>::random([16], Distribution::Default, device))
    };
    for plain in devices() {
        let device = nothing(&plain);
        let first = draw(&device);
        assert_eq!(first, draw(&device));
        assert!(first.iter().any(|value| *value != first[0]));
    }
}
