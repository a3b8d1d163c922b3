//! What fp8 costs an unmodified model in accuracy, beside f32: signal-to-noise ratios above those that torchao's tests of its own
//! fp8 training ask for (`test/float8/test_base.py`, 20 dB for the output and every gradient of a feed-forward block).

use burn::{
    module::{Module, ModuleMapper, Param},
    nn::{Gelu, Linear, LinearConfig},
    tensor::{DType, Device, Distribution, Tensor, TensorData},
};
use burn_amp::{
    Autocast, Policy,
    recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RowwiseScaling},
};

use super::devices::devices;

/// A transformer's feed-forward block, as anybody writes it.
#[derive(Module, Debug)]
struct FeedForward {
    up: Linear,
    down: Linear,
    gelu: Gelu,
}

impl FeedForward {
    fn new(device: &Device) -> Self {
        Self {
            up: LinearConfig::new(64, 128).init(device),
            down: LinearConfig::new(128, 64).init(device),
            gelu: Gelu::new(),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.gelu.forward(self.up.forward(x)))
    }
}

/// Moves a module's values by way of the host, which no device rounds.
struct Onto<'a>(&'a Device);

impl ModuleMapper for Onto<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let moved = Tensor::from_data(tensor.into_data(), self.0).require_grad();
        Param::from_mapped_value(id, moved, mapper)
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Output, and gradients of the input, both weights and both biases, of the second of two steps: delayed scaling goes by what the
/// first one showed.
fn passes(model: &FeedForward, [x, gradient]: [&TensorData; 2], device: &Device) -> Vec<Vec<f32>> {
    let device = device.clone().autodiff();
    let model = model.clone().map(&mut Onto(&device));
    let step = || {
        let x = Tensor::<3>::from_data(x.clone(), &device).require_grad();
        let gradient = Tensor::<3>::from_data(gradient.clone(), &device);
        let output = model.forward(x.clone());
        let gradients = (output.clone() * gradient).sum().backward();
        let bias =
            |linear: &Linear| values(linear.bias.as_ref().unwrap().grad(&gradients).unwrap());
        vec![
            values(output),
            values(x.grad(&gradients).unwrap()),
            values(model.up.weight.grad(&gradients).unwrap()),
            values(model.down.weight.grad(&gradients).unwrap()),
            bias(&model.up),
            bias(&model.down),
        ]
    };
    step();
    step()
}

/// In decibels.
fn signal_to_noise(expected: &[f32], found: &[f32]) -> f64 {
    assert_eq!(expected.len(), found.len());
    let square = |value: f64| value * value;
    let signal: f64 = expected.iter().map(|&x| square(x.into())).sum();
    let pairs = expected.iter().zip(found);
    let noise: f64 = pairs
        .map(|(&x, &y)| square(f64::from(x) - f64::from(y)))
        .sum();
    10.0 * (signal / noise).log10()
}

#[test]
fn a_feed_forward_block_in_fp8_is_within_torchaos_noise() {
    let plain = Device::flex();
    plain.seed(5);
    let model = FeedForward::new(&plain);
    // Batches of 128 rows, so that blocks have all their rows.
    let random = |device: &Device| {
        Tensor::<3>::random([2, 64, 64], Distribution::Normal(0.0, 1.0), device).into_data()
    };
    let [x, gradient] = [random(&plain), random(&plain)];
    let expected = passes(&model, [&x, &gradient], &plain);
    let recipes: [Fp8Recipe; 4] = [
        DelayedScaling::new().into(),
        CurrentScaling::new().into(),
        RowwiseScaling::new().into(),
        BlockScaling::new().into(),
    ];
    for recipe in recipes {
        for under in devices() {
            // WGSL has no bf16.
            let rest = match under.supports_dtype(DType::BF16) {
                true => Policy::bf16(),
                false => Policy::fp16(),
            };
            let autocast = Autocast::fp8(recipe).unwrap().rest(rest);
            let lease = autocast.lease(under).unwrap();
            let found = passes(&model, [&x, &gradient], &lease.device());
            let names = ["output", "input", "up", "down", "up's bias", "down's bias"];
            for ((name, expected), found) in names.iter().zip(&expected).zip(&found) {
                let ratio = signal_to_noise(expected, found);
                assert!(ratio > 20.0, "{name}: {ratio:.1} dB by {recipe:?}");
                // And were in fp8: in bf16 there is less noise than that.
                let is_product = !name.ends_with("bias");
                assert!(
                    !is_product || ratio < 40.0,
                    "{name}: {ratio:.1} dB by {recipe:?}"
                );
            }
        }
    }
}
