//! A small vision transformer and a small language model learn real data in fp8 with delayed scaling as well as in bf16.
//!
//! Both trainings start with the same weights and see the same batches. Between embedding and head, the products of layers run in
//! bf16 or in fp8, by `Fp8Linear`; everything else is in f32.

use burn::module::{Initializer, Module, Param};
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    loss::CrossEntropyLossConfig,
};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{
    Bool, Device, FloatDType, Int, Tensor, TensorData,
    activation::{gelu, softmax},
};
use burn_fp8::{Fp8Linear, recipe::DelayedScaling};

use super::device::Random;
use super::training::Digits;

const WIDTH: usize = 32;
const HEADS: usize = 4;

/// A linear layer in either precision.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)] // There are only a few.
enum Projection {
    Bf16(Linear),
    Fp8(Fp8Linear),
}

impl Projection {
    fn new(random: &mut Random, d_input: usize, d_output: usize, device: &Device) -> Self {
        Self::Bf16(linear(random, d_input, d_output, device))
    }

    fn into_fp8(self) -> Self {
        match self {
            Self::Bf16(linear) => {
                let recipe = DelayedScaling::new().with_amax_history_len(16);
                Self::Fp8(Fp8Linear::from_linear(linear, recipe).unwrap())
            }
            fp8 => fp8,
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Bf16(layer) => {
                let low = |tensor: Tensor<3>| tensor.cast(FloatDType::BF16);
                let product = low(x).matmul(low(layer.weight.val().unsqueeze()));
                product.cast(FloatDType::F32) + layer.bias.as_ref().unwrap().val().unsqueeze()
            }
            Self::Fp8(layer) => layer.forward(x),
        }
    }
}

/// Weights from the test's own generator. A device's generator serves other tests too, in any order.
fn linear(random: &mut Random, d_input: usize, d_output: usize, device: &Device) -> Linear {
    let config = LinearConfig::new(d_input, d_output).with_initializer(Initializer::Zeros);
    let mut linear = config.init(device);
    let weight = random.matrix([d_input, d_output], device) / (d_input as f32).sqrt();
    linear.weight = Param::from_tensor(weight.require_grad());
    linear
}

/// A transformer layer that normalizes first.
#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    attention: Projection,
    joined: Projection,
    feed_forward_norm: LayerNorm,
    up: Projection,
    down: Projection,
}

impl Block {
    fn new(random: &mut Random, device: &Device) -> Self {
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        Self {
            attention_norm: norm(),
            attention: Projection::new(random, WIDTH, 3 * WIDTH, device),
            joined: Projection::new(random, WIDTH, WIDTH, device),
            feed_forward_norm: norm(),
            up: Projection::new(random, WIDTH, 4 * WIDTH, device),
            down: Projection::new(random, 4 * WIDTH, WIDTH, device),
        }
    }

    fn into_fp8(self) -> Self {
        Self {
            attention: self.attention.into_fp8(),
            joined: self.joined.into_fp8(),
            up: self.up.into_fp8(),
            down: self.down.into_fp8(),
            ..self
        }
    }

    fn forward(&self, x: Tensor<3>, hidden: Option<&Tensor<4, Bool>>) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let heads = self
            .attention
            .forward(self.attention_norm.forward(x.clone()));
        let heads = heads.chunk(3, 2).into_iter().map(|part| {
            let split = part.reshape([batch, length, HEADS, WIDTH / HEADS]);
            split.swap_dims(1, 2)
        });
        let [query, key, value] = heads.collect::<Vec<_>>().try_into().unwrap();
        let mut scores = query.matmul(key.transpose()) / ((WIDTH / HEADS) as f32).sqrt();
        if let Some(hidden) = hidden {
            scores = scores.mask_fill(hidden.clone().expand([batch, HEADS, length, length]), -1e9);
        }
        let joined = softmax(scores, 3).matmul(value).swap_dims(1, 2);
        let x = x + self.joined.forward(joined.reshape([batch, length, WIDTH]));
        let inner = gelu(self.up.forward(self.feed_forward_norm.forward(x.clone())));
        x + self.down.forward(inner)
    }
}

/// The part that both models share.
#[derive(Module, Debug)]
struct Trunk {
    positions: Param<Tensor<3>>,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Trunk {
    fn new(random: &mut Random, [length, classes]: [usize; 2], device: &Device) -> Self {
        let positions = random.matrix([length, WIDTH], device).unsqueeze() * 0.02;
        Self {
            positions: Param::from_tensor(positions.require_grad()),
            blocks: vec![Block::new(random, device)],
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: linear(random, WIDTH, classes, device),
        }
    }

    fn into_fp8(self) -> Self {
        let blocks = self.blocks.into_iter().map(Block::into_fp8);
        Self {
            blocks: blocks.collect(),
            ..self
        }
    }

    fn forward(&self, x: Tensor<3>, hidden: Option<&Tensor<4, Bool>>) -> Tensor<3> {
        let x = x + self.positions.val();
        let x = self
            .blocks
            .iter()
            .fold(x, |x, block| block.forward(x, hidden));
        self.norm.forward(x)
    }
}

/// Classifies digits of 8x8 pixels, as 16 patches of 2x2.
#[derive(Module, Debug)]
struct Vit {
    embedding: Linear,
    trunk: Trunk,
}

impl Vit {
    fn new(device: &Device) -> Self {
        let mut random = Random::new(60);
        Self {
            embedding: linear(&mut random, 4, WIDTH, device),
            trunk: Trunk::new(&mut random, [16, 10], device),
        }
    }

    fn logits(&self, images: Tensor<2>) -> Tensor<2> {
        let [batch, _] = images.dims();
        let patches = images.reshape([batch, 4, 2, 4, 2]).swap_dims(2, 3);
        let x = self.embedding.forward(patches.reshape([batch, 16, 4]));
        let mean: Tensor<2> = self.trunk.forward(x, None).mean_dim(1).squeeze_dim(1);
        self.trunk.head.forward(mean)
    }
}

/// Predicts the next letter of a text.
#[derive(Module, Debug)]
struct Gpt {
    embedding: Embedding,
    trunk: Trunk,
}

/// The number of letters that the model sees.
const CONTEXT: usize = 32;

impl Gpt {
    fn new(letters: usize, device: &Device) -> Self {
        let mut random = Random::new(61);
        let mut embedding = EmbeddingConfig::new(letters, WIDTH).init(device);
        let weight = random.matrix([letters, WIDTH], device) * 0.1;
        embedding.weight = Param::from_tensor(weight.require_grad());
        Self {
            embedding,
            trunk: Trunk::new(&mut random, [CONTEXT, letters], device),
        }
    }

    /// For each position, the logits of the letter after it.
    fn logits(&self, text: Tensor<2, Int>) -> Tensor<2> {
        let later = Tensor::<2, Bool>::tril_mask([CONTEXT, CONTEXT], 0, &text.device());
        let x = self.embedding.forward(text);
        let x = self.trunk.forward(x, Some(&later.unsqueeze()));
        self.trunk.head.forward(x).flatten(0, 1)
    }
}

/// Trains on batches from `batch`, with a learning rate that falls to zero, and returns the model and the losses.
fn train<M: Module, B>(
    mut model: M,
    steps: usize,
    mut batch: impl FnMut() -> B,
    logits: impl Fn(&M, B) -> (Tensor<2>, Tensor<1, Int>),
) -> (M, Vec<f64>) {
    let mut optim = AdamConfig::new().init();
    let losses = (0..steps).map(|step| {
        let (logits, labels) = logits(&model, batch());
        let criterion = CrossEntropyLossConfig::new().init(&logits.device());
        let loss = criterion.forward(logits, labels);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let lr = 0.006 * (1.0 - step as f64 / steps as f64);
        model = optim.step(lr, model.clone(), gradients);
        f64::from(loss.into_scalar::<f32>())
    });
    let losses = losses.collect();
    (model, losses)
}

#[test]
fn a_vision_transformer_learns_in_fp8_as_in_bf16() {
    let device = Device::flex().autodiff();
    let digits = Digits::load();
    let (held_out, rest): (Vec<usize>, Vec<usize>) =
        (0..digits.labels.len()).partition(|index| index % 5 == 0);
    let accuracy = |model: Vit| {
        let mut random = Random::new(62);
        let batch = || {
            (0..64)
                .map(|_| rest[random.bits() as usize % rest.len()])
                .collect()
        };
        let (model, _) = train(model, 400, batch, |model, batch: Vec<usize>| {
            let (images, labels) = digits.batch(&batch, &device);
            (model.logits(images), labels)
        });
        let (images, labels) = digits.batch(&held_out, &device.clone().inner());
        let found = model.valid().logits(images).argmax(1).squeeze_dim::<1>(1);
        let right = found.equal(labels).int().sum().into_scalar::<i32>();
        f64::from(right) / held_out.len() as f64
    };
    let model = Vit::new(&device);
    let bf16 = accuracy(model.clone());
    let trunk = model.trunk.clone().into_fp8();
    let fp8 = accuracy(Vit { trunk, ..model });
    println!("accuracy in bf16 {bf16:.4}, in fp8 {fp8:.4}");
    assert!(bf16 > 0.9, "bf16: {bf16}");
    assert!(fp8 > bf16 - 0.005, "fp8: {fp8}, bf16: {bf16}");
}

#[test]
fn a_language_model_learns_in_fp8_as_in_bf16() {
    let device = Device::flex().autodiff();
    // English prose that every copy of the project contains.
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../LICENSE-APACHE");
    let text = std::fs::read(path).unwrap();
    let mut letters = text.clone();
    letters.sort_unstable();
    letters.dedup();
    let number = |letter: &u8| letters.binary_search(letter).unwrap() as i32;
    let text: Vec<i32> = text.iter().map(number).collect();
    // The last sixth begins here. No training sees it.
    let held_out = text.len() * 5 / 6;
    let logits = |model: &Gpt, starts: &[usize], device: &Device| {
        let part = |after: usize| {
            let letters = starts
                .iter()
                .flat_map(|start| &text[start + after..][..CONTEXT]);
            let letters = TensorData::new(letters.copied().collect(), [starts.len(), CONTEXT]);
            Tensor::<2, Int>::from_data(letters, device)
        };
        (model.logits(part(0)), part(1).flatten(0, 1))
    };
    let loss = |model: Gpt| {
        let mut random = Random::new(63);
        let batch = || {
            let start = |_| random.bits() as usize % (held_out - CONTEXT);
            (0..16).map(start).collect()
        };
        let (model, losses) = train(model, 200, batch, |model, starts: Vec<usize>| {
            logits(model, &starts, &device)
        });
        let plain = device.clone().inner();
        let starts: Vec<usize> = (held_out..text.len() - CONTEXT).step_by(CONTEXT).collect();
        let (logits, labels) = logits(&model.valid(), &starts, &plain);
        let criterion = CrossEntropyLossConfig::new().init(&plain);
        let loss = criterion.forward(logits, labels).into_scalar::<f32>();
        (losses[0], f64::from(loss))
    };
    let model = Gpt::new(letters.len(), &device);
    let (first, bf16) = loss(model.clone());
    let trunk = model.trunk.clone().into_fp8();
    let (_, fp8) = loss(Gpt { trunk, ..model });
    println!("loss in bf16 {bf16:.4}, in fp8 {fp8:.4}, at first {first:.4}");
    assert!(bf16 < 0.7 * first, "bf16: {bf16}, at first {first}");
    assert!(fp8 < 1.01 * bf16, "fp8: {fp8}, bf16: {bf16}");
}
