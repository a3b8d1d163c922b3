//! What a layer is told of where the factors of a product come from.

use super::devices::Leased;
use burn::{
    module::ParamId,
    nn::{EmbeddingConfig, Initializer},
    tensor::{
        DType, Device, Distribution, Int, Tensor, activation,
        distributed::{DistributedConfig, DistributedContext, ReduceOperation},
        module::attention,
    },
};
use burn_backend::{DeviceId, distributed};
use burn_layer::{FloatView, Inputs, Layer, Layers, Op, Plan, Reduced, ops_come_whole};
use std::sync::{Arc, Mutex};

/// Writes down of every product whether its left factor is a gradient, and its right one a gradient or computed.
#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Vec<[bool; 3]>>>);

impl Layer for Recorder {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        if op == Op::float_matmul {
            self.0.lock().unwrap().push([
                inputs.first_is_gradient,
                inputs.last_is_gradient,
                inputs.last_is_computed,
            ]);
        }
        None
    }

    /// As of one device.
    fn all_reduce(
        &self,
        tensor: FloatView<'_>,
        _op: distributed::ReduceOperation,
        _devices: &[DeviceId],
    ) -> Option<Reduced> {
        Some(Reduced::Ready(tensor.read().unwrap()))
    }

    fn sync_collective(&self) -> bool {
        true
    }
}

impl Recorder {
    fn device(&self) -> Device {
        let layers = Layers::on(Device::flex()).layer(self.clone());
        layers.leased().autodiff()
    }

    /// Of the products since the last call.
    fn products(&self, device: &Device) -> Vec<[bool; 3]> {
        device.sync().unwrap();
        core::mem::take(&mut self.0.lock().unwrap())
    }
}

/// An activation, or a parameter: what a product is to be told of its right factor.
const PARAMETER: [bool; 3] = [false, false, false];
const ACTIVATION: [bool; 3] = [false, false, true];

fn random(device: &Device) -> Tensor<2> {
    Tensor::random([4, 4], Distribution::Default, device)
}

/// Activations come of products; parameters do not, nor what is made of them element by element.
#[test]
fn activations_are_computed_and_parameters_are_not() {
    let recorder = Recorder::default();
    let device = recorder.device();
    let [x, weight] = [0, 1].map(|_| random(&device));
    let told = |right: Tensor<2>| {
        recorder.products(&device);
        x.clone().matmul(right);
        recorder.products(&device)
    };
    let made = x.clone().matmul(weight.clone());
    for parameter in [
        x.clone(),
        weight.clone().transpose(),
        weight.clone() / weight.clone().powi_scalar(2).sum().sqrt().unsqueeze(),
        Tensor::eye(4, &device),
        made.clone().greater_scalar(0.5).float(),
    ] {
        assert_eq!(told(parameter), [PARAMETER]);
    }
    let query: Tensor<4> = x.clone().unsqueeze();
    let attended = attention(
        query.clone(),
        query.clone(),
        query,
        None,
        None,
        Default::default(),
    );
    let tokens = Tensor::<2, Int>::from_ints([[0, 1, 2, 3]], &device);
    let embedding = EmbeddingConfig::new(5, 4).init(&device);
    let embedded = match ops_come_whole() {
        true => embedding.forward(tokens).squeeze_dim(0),
        // Rows of a tensor, as any others.
        false => made.clone().select(0, tokens.squeeze_dim(0)),
    };
    for activation in [
        made.clone().transpose(),
        activation::softmax(made.clone() * 2.0, 1) + x.clone(),
        Tensor::cat(vec![x.clone(), made], 0).slice(0..4),
        attended.squeeze_dims(&[0, 1]),
        embedded,
    ] {
        assert_eq!(told(activation), [ACTIVATION]);
    }
}

/// A product's backward: `dy w^T`, then `x^T dy`.
#[test]
fn backward_is_told_from_forward() {
    let recorder = Recorder::default();
    let device = recorder.device();
    let [x, first, second] = [0, 1, 2].map(|_| random(&device).require_grad());
    let loss = activation::relu(x.matmul(first)).matmul(second).sum();
    assert_eq!(recorder.products(&device), [PARAMETER; 2]);
    loss.backward();
    let [input, weight] = [[true, false, false], [false, true, false]];
    assert_eq!(recorder.products(&device), [input, weight, input, weight]);
}

/// A parameter of one element that begins as 1 looks as the beginning of a backward pass does.
#[test]
fn a_factor_of_one_makes_no_gradients() {
    let recorder = Recorder::default();
    let device = recorder.device();
    let gamma = Tensor::<1>::ones([1], &device);
    let [x, weight] = [0, 1].map(|_| random(&device));
    let scaled = || x.clone() * gamma.clone().unsqueeze();
    recorder.products(&device);
    let product = scaled().matmul(weight.clone());
    product.clone().matmul(weight.clone());
    activation::gelu(scaled()).matmul(weight.clone());
    weight.clone().matmul(product);
    let [_, after_product, after_gelu, by_product] = recorder.products(&device)[..] else {
        panic!("there were four products");
    };
    assert_eq!(after_product, PARAMETER);
    assert_eq!(by_product, ACTIVATION);
    // In parts it is made of ops that backward has too.
    if ops_come_whole() {
        assert_eq!(after_gelu, PARAMETER);
    }
}

/// Whatever a parameter was made by, an optimizer's step makes one of it.
#[test]
fn a_step_makes_a_parameter() {
    let recorder = Recorder::default();
    let device = recorder.device();
    let weight = Initializer::Orthogonal { gain: 1.0 }.init([4, 4], &device);
    let x = random(&device);
    weight.val();
    recorder.products(&device);
    let loss = x.clone().matmul(weight.val()).sum();
    assert_eq!(recorder.products(&device), [ACTIVATION]);
    let gradient = weight.grad(&loss.backward()).unwrap();
    let weight = weight.val().without_autodiff();
    let x = x.without_autodiff();
    // As `burn::optim` has it: with weight decay, right after backward, and without it, at any time.
    for penalized in [weight.clone() * 0.01 + gradient.clone(), gradient] {
        let momentum = penalized.clone() * 0.9 + penalized * 0.1;
        let stepped = weight.clone() - momentum * 0.1;
        recorder.products(&device);
        x.clone().matmul(stepped);
        assert_eq!(recorder.products(&device), [PARAMETER]);
    }
}

/// A parameter of one element that began as 1 looks like the beginning of a backward pass, but not after its first step.
#[test]
fn a_step_on_a_factor_of_one_makes_a_parameter() {
    let recorder = Recorder::default();
    let device = recorder.device();
    let gamma = Tensor::<1>::ones([1], &device).require_grad();
    let [x, weight] = [0, 1].map(|_| random(&device));
    let loss = (x.clone() * gamma.clone().unsqueeze()).sum();
    let gradient = gamma.grad(&loss.backward()).unwrap();
    let gamma = gamma.without_autodiff();
    let [x, weight] = [x, weight].map(Tensor::without_autodiff);
    // As SGD has it, and with decoupled weight decay.
    for decayed in [gamma.clone(), gamma * 0.99] {
        let stepped = decayed - gradient.clone() * 0.1;
        let scaled = x.clone().matmul(x.clone()) * stepped.unsqueeze();
        recorder.products(&device);
        weight.clone().matmul(scaled.clone());
        scaled.matmul(weight.clone());
        assert_eq!(recorder.products(&device), [ACTIVATION, PARAMETER]);
    }
}

/// What comes back of a collective is what went.
#[test]
fn a_reduced_gradient_is_a_gradient() {
    let recorder = Recorder::default();
    let device = recorder.device();
    let config = DistributedConfig {
        all_reduce_op: ReduceOperation::Mean,
    };
    let context = DistributedContext::init(vec![device.clone()], config);
    let weight = random(&device)
        .require_grad()
        .set_distributed(ParamId::new());
    let gradients = weight.clone().powi_scalar(2).sum().backward();
    drop(context);
    let gradient = weight.grad(&gradients).unwrap();
    recorder.products(&device);
    random(&device).without_autodiff().matmul(gradient);
    assert_eq!(recorder.products(&device), [[false, true, false]]);
}

/// Writes down what of elementwise products the layer is told, and has zeros and ones stored in bf16.
#[derive(Clone, Debug, Default)]
struct Parts(Arc<Mutex<Vec<[Option<DType>; 3]>>>);

impl Layer for Parts {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        match op {
            Op::float_random => {
                assert_eq!((inputs.nominal, inputs.shapes.len()), (DType::F32, 1));
                Some(Plan::default().store(DType::BF16))
            }
            Op::float_mul => {
                let told = [inputs.masked, inputs.gated, Some(inputs.widest)];
                self.0.lock().unwrap().push(told);
                None
            }
            Op::float_sin => Some(Plan::default().store(DType::F16)),
            _ => None,
        }
    }
}

#[test]
fn masks_and_gates_are_told() {
    let parts = Parts::default();
    let layers = Layers::on(Device::flex()).layer(parts.clone());
    let device = layers.leased();
    let told = |product: &dyn Fn() -> Tensor<2>| {
        product();
        device.sync().unwrap();
        parts.0.lock().unwrap().pop().unwrap()
    };
    let x = random(&device).sin();
    let wide = random(&device);
    let mask = || x.random_like(Distribution::Bernoulli(0.5));
    let gate = || activation::sigmoid(wide.clone());
    let (f16, f32) = (Some(DType::F16), Some(DType::F32));
    assert_eq!(told(&|| x.clone() * mask()), [f16, None, f32]);
    assert_eq!(told(&|| mask() * x.clone()), [f16, None, f32]);
    assert_eq!(told(&|| wide.clone() * mask()), [f32, None, f32]);
    assert_eq!(told(&|| x.clone() * gate()), [None, f16, f32]);
    assert_eq!(told(&|| gate() * x.clone()), [None, f16, f32]);
    let row = || gate().narrow(0, 0, 1).mul_scalar(1.0);
    assert_eq!(told(&|| x.clone() * row()), [None, None, f32]);
    let expanded = || activation::sigmoid(wide.clone().narrow(0, 0, 1)).expand([4, 4]);
    assert_eq!(told(&|| x.clone() * expanded()), [None, f16, f32]);
    assert_eq!(told(&|| x.clone() * wide.clone()), [None, None, f32]);
    let drawn = || x.random_like(Distribution::Default);
    assert_eq!(told(&|| x.clone() * drawn()), [None, None, f32]);
    let compared = || wide.clone().greater_scalar(0.5).float();
    assert_eq!(told(&|| x.clone() * compared()), [f16, None, f32]);
}

/// Writes down what of sums the layer is told, and stores products with sigmoids as what they multiply.
#[derive(Clone, Debug, Default)]
struct Sums(Arc<Mutex<Vec<Option<DType>>>>);

impl Layer for Sums {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        match op {
            Op::float_matmul => Some(Plan::compute(DType::BF16)),
            Op::sigmoid => Some(Plan::compute(DType::F32)),
            Op::float_mul if inputs.gated == Some(DType::BF16) => {
                Some(Plan::compute(DType::F32).store(DType::BF16))
            }
            Op::float_add => {
                self.0.lock().unwrap().push(inputs.of_gated);
                Some(inputs.promote())
            }
            _ => Some(inputs.promote()),
        }
    }
}

#[test]
fn gradients_of_what_a_gate_multiplies_are_told() {
    let sums = Sums::default();
    let device = Layers::on(Device::flex()).layer(sums.clone()).leased();
    let device = device.autodiff();
    let told = |y: &dyn Fn(Tensor<2>) -> Tensor<2>| {
        let x = random(&device).require_grad();
        let y = y(x.clone().matmul(random(&device)));
        // So the gradient is of a product, in bf16.
        let loss = y.matmul(random(&device)).sum();
        device.sync().unwrap();
        sums.0.lock().unwrap().clear();
        x.grad(&loss.backward()).unwrap().into_data();
        core::mem::take(&mut *sums.0.lock().unwrap())
    };
    let bf16 = Some(DType::BF16);
    assert_eq!(told(&activation::silu), [bf16]);
    // Other gradients come between.
    assert_eq!(told(&|x| activation::silu(x.clone()) * x), [None, None]);
    // By the sigmoid of something else, and another function of it.
    let other = |x: Tensor<2>| x.clone() * activation::sigmoid(x * 2.0);
    assert_eq!(told(&other), [None]);
    assert_eq!(told(&|x| x.clone() * x.tanh()), [None]);
}
