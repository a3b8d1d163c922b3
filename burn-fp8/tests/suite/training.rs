//! A small network learns real digits about as well in fp8 as in f32.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData, activation::relu};
use burn_fp8::Fp8Linear;
use burn_fp8::recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RowwiseScaling};

use super::device::Random;

const BATCH: usize = 64;

#[derive(Module, Debug)]
struct Plain {
    hidden: Linear,
    head: Linear,
}

#[derive(Module, Debug)]
struct Quantized {
    hidden: Fp8Linear,
    head: Fp8Linear,
}

trait Network: Module {
    fn logits(&self, images: Tensor<2>) -> Tensor<2>;
}

impl Network for Plain {
    fn logits(&self, images: Tensor<2>) -> Tensor<2> {
        self.head.forward(relu(self.hidden.forward(images)))
    }
}

impl Network for Quantized {
    fn logits(&self, images: Tensor<2>) -> Tensor<2> {
        self.head.forward(relu(self.hidden.forward(images)))
    }
}

pub(crate) struct Digits {
    images: Vec<f32>,
    pub(crate) labels: Vec<i64>,
}

impl Digits {
    pub(crate) fn load() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/digits.bin");
        let bytes = std::fs::read(path).unwrap();
        let rows = || bytes.chunks_exact(65);
        Self {
            images: rows()
                .flat_map(|row| row[..64].iter().map(|&x| f32::from(x) / 16.0))
                .collect(),
            labels: rows().map(|row| i64::from(row[64])).collect(),
        }
    }

    pub(crate) fn batch(&self, indices: &[usize], device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
        let images = indices
            .iter()
            .flat_map(|i| self.images[i * 64..][..64].to_vec())
            .collect();
        let labels: Vec<i64> = indices.iter().map(|&i| self.labels[i]).collect();
        (
            Tensor::from_data(TensorData::new(images, [indices.len(), 64]), device),
            Tensor::from_data(TensorData::new(labels, [indices.len()]), device),
        )
    }
}

/// Trains on four fifths of the images, and returns the accuracy on the rest (every fifth image).
fn train<N: Network>(mut network: N, device: &Device) -> f64 {
    let digits = Digits::load();
    let total = digits.labels.len();
    let (held_out, mut order): (Vec<usize>, Vec<usize>) =
        (0..total).partition(|index| index % 5 == 0);
    let mut optim = AdamConfig::new().init();
    let mut random = Random::new(40);
    for _ in 0..12 {
        for last in (1..order.len()).rev() {
            order.swap(last, random.bits() as usize % (last + 1));
        }
        for batch in order.chunks(BATCH) {
            let (images, labels) = digits.batch(batch, device);
            let logits = network.logits(images);
            let loss = CrossEntropyLossConfig::new()
                .init(device)
                .forward(logits, labels);
            let gradients = GradientsParams::from_grads(loss.backward(), &network);
            network = optim.step(0.003, network, gradients);
        }
    }
    let (images, labels) = digits.batch(&held_out, &device.clone().without_autodiff());
    let correct = network
        .valid()
        .logits(images)
        .argmax(1)
        .reshape([held_out.len()])
        .equal(labels);
    f64::from(correct.int().sum().into_scalar::<i32>()) / held_out.len() as f64
}

#[test]
fn a_network_learns_in_fp8_as_in_f32() {
    let device = Device::flex().autodiff();
    device.seed(1);
    let plain = Plain {
        hidden: LinearConfig::new(64, 64).init(&device),
        head: LinearConfig::new(64, 10).init(&device),
    };
    let accuracy = train(plain.clone(), &device);
    assert!(accuracy > 0.93, "f32: {accuracy}");
    let recipes: [Fp8Recipe; 4] = [
        DelayedScaling::new().with_amax_history_len(16).into(),
        CurrentScaling::new().into(),
        RowwiseScaling::new().into(),
        BlockScaling::new().with_size(32).into(),
    ];
    for recipe in recipes {
        let convert = |linear: &Linear| Fp8Linear::from_linear(linear.clone(), recipe).unwrap();
        let quantized = Quantized {
            hidden: convert(&plain.hidden),
            head: convert(&plain.head),
        };
        let fp8 = train(quantized, &device);
        assert!(fp8 > accuracy - 0.015, "{recipe:?}: {fp8}, f32: {accuracy}");
    }
}
