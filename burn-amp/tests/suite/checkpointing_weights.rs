//! Gradient checkpointing: gradients of weights whose layers have inputs that backward computes again.

use super::checkpointing::wave;
use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    tensor::{
        DType, Device, Tensor,
        activation::{gelu, relu},
    },
};
use burn_amp::{
    Autocast, Fp8State, Op, full_precision,
    recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe},
};

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// 300 times 300 is more than fp16 holds.
#[test]
fn a_region_in_full_precision_has_gradients_in_f32() {
    let autocast = Autocast::fp16().lease(Device::flex()).unwrap();
    let device = autocast.device().autodiff().gradient_checkpointing();
    let [first, second] = [0, 1].map(|_| Tensor::<2>::eye(4, &device).require_grad());
    let x = Tensor::<2>::full([4, 4], 300.0, &device);
    let hidden = relu(x.matmul(first));
    let output = full_precision(|| hidden.matmul(second.clone()));
    let gradients = (output * 300.0).sum().backward();
    // Four rows of each.
    let gradient = values(second.grad(&gradients).unwrap());
    assert_eq!(gradient, [4.0 * 300.0 * 300.0; 16]);
    let report = autocast.report();
    assert_eq!(report.runs_of(Op::float_matmul, DType::F32), 3);
}

/// What the weight is multiplied with is computed again. The step of an optimizer on a gradient that is stored low would be rounded.
#[test]
fn the_gradient_of_a_weight_on_the_left_is_stored_in_f32() {
    let autocast = Autocast::bf16().lease(Device::flex()).unwrap();
    let device = autocast.device().autodiff().gradient_checkpointing();
    let weight = wave([4, 4], &device).require_grad();
    let hidden = -wave([4, 4], &device).require_grad();
    let gradients = weight.clone().matmul(hidden).sum().backward();
    // It runs in the dtype that it is given.
    values(weight.grad(&gradients).unwrap().ceil());
    let report = autocast.report();
    let ran = |dtype| report.runs_of(Op::float_ceil, dtype);
    assert_eq!((ran(DType::F32), ran(DType::BF16)), (1, 0));
}

/// Four layers of one size, three of which have one input, and a last one.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    heads: Vec<Linear>,
    last: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |outputs| LinearConfig::new(32, outputs).init(device);
        Self {
            first: linear(32),
            heads: vec![linear(32), linear(32), linear(32)],
            last: linear(16),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<1> {
        let hidden = gelu(self.first.forward(x)) * 1.5;
        let [a, b, c] = [0, 1, 2].map(|head| self.heads[head].forward(hidden.clone()));
        self.last.forward(gelu(a * b + c)).flatten(0, 2)
    }
}

struct Collect(Vec<Vec<f32>>);

impl ModuleVisitor for Collect {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(values(param.val()));
    }
}

/// Three steps; what they leave, the state of delayed scaling, and how often a product ran in fp8.
fn train(recipe: &Fp8Recipe, checkpointing: bool) -> (Vec<Vec<f32>>, Fp8State, u64) {
    let autocast = Autocast::fp8(*recipe).unwrap();
    let autocast = autocast.lease(Device::flex()).unwrap();
    let device = autocast.device().autodiff();
    let device = match checkpointing {
        true => device.gradient_checkpointing(),
        false => device,
    };
    let mut net = Net::new(&device);
    let mut fill = 0.0;
    net = net.map(&mut Fill(&mut fill));
    let mut optimizer = SgdConfig::new().init();
    for step in 1..=3 {
        let x = wave([2, 8, 32], &device) * step as f32;
        let loss = net.forward(x).powf_scalar(2.0).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(1e-4, net, gradients);
    }
    let mut collect = Collect(Vec::new());
    net.visit(&mut collect);
    let state = autocast.fp8_state().unwrap();
    (collect.0, state, autocast.report().fp8_runs())
}

/// Parameters that are the same on every device.
struct Fill<'a>(&'a mut f32);

impl burn::module::ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        *self.0 += 0.3;
        let (id, tensor, mapper) = param.consume();
        let value = (wave(tensor.dims(), &tensor.device().inner()) + *self.0).sin() * 0.3;
        let value = Tensor::from_data(value.into_data(), &tensor.device()).require_grad();
        Param::from_mapped_value(id, value, mapper)
    }
}

#[test]
fn layers_in_fp8_are_so_in_backward() {
    for recipe in [
        Fp8Recipe::from(CurrentScaling::new()),
        DelayedScaling::new().into(),
        DelayedScaling::new().with_amax_history_len(2).into(),
        BlockScaling::new().into(),
    ] {
        let [kept, again] = [false, true].map(|checkpointing| train(&recipe, checkpointing));
        // Of the first layer's input there is no gradient.
        assert_eq!(kept.2, 3 * (3 * 5 - 1), "{recipe:?}");
        assert_eq!(again.2, kept.2, "{recipe:?}");
        assert_eq!(again.0, kept.0, "{recipe:?}");
        assert_eq!(again.1, kept.1, "{recipe:?}");
    }
}
