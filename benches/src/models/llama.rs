//! LLaMA of Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models", with grouped queries as from LLaMA 2 on.

use burn::{
    module::{Initializer, Module},
    nn::{
        Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding,
        RotaryEncodingConfig, SwiGlu, SwiGluConfig, attention::generate_autoregressive_mask,
    },
    tensor::{
        Bool, Device, FloatDType, Int, Tensor,
        activation::{silu, softmax},
    },
};

/// The width of a head.
const HEAD: usize = 64;

/// The sizes of a [`Llama`]. Heads are of 64.
#[derive(Clone, Copy, Debug)]
pub struct LlamaSizes {
    /// The number of blocks.
    pub layers: usize,
    /// The width of the residual stream.
    pub width: usize,
    /// The width of a feed-forward layer.
    pub inner: usize,
    /// The number of heads of keys and values, each of which several heads of queries share.
    pub groups: usize,
    /// The number of kinds of tokens.
    pub vocabulary: usize,
    /// The most tokens of a text.
    pub context: usize,
}

/// A language model whose last layer shares the weights of its token embedding.
///
/// ```
/// use benches::models::{Llama, LlamaSizes};
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let sizes = LlamaSizes { layers: 1, width: 128, inner: 256, groups: 1, vocabulary: 100, context: 16 };
/// let model = Llama::new(sizes, &device);
/// assert_eq!(model.forward(Tensor::zeros([2, 8], &device)).dims(), [2, 8, 100]);
/// ```
#[derive(Module, Debug)]
pub struct Llama {
    tokens: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    rope: RotaryEncoding,
}

#[derive(Module, Debug)]
struct Block {
    norm_1: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm_2: RmsNorm,
    swiglu: SwiGlu,
    down: Linear,
}

impl Llama {
    /// The sizes of SmolLM2-135M (Ben Allal et al. 2025), with a context of 1,024.
    pub fn smol(device: &Device) -> Self {
        let sizes = LlamaSizes {
            layers: 30,
            width: 576,
            inner: 1_536,
            groups: 3,
            vocabulary: 49_152,
            context: 1_024,
        };
        Self::new(sizes, device)
    }

    /// A model of these sizes.
    pub fn new(sizes: LlamaSizes, device: &Device) -> Self {
        let block = |_| Block::new(sizes, device);
        let initializer = Initializer::Normal {
            mean: 0.0,
            std: 0.02,
        };
        Self {
            tokens: EmbeddingConfig::new(sizes.vocabulary, sizes.width)
                .with_initializer(initializer)
                .init(device),
            blocks: (0..sizes.layers).map(block).collect(),
            norm: RmsNormConfig::new(sizes.width).init(device),
            rope: RotaryEncodingConfig::new(sizes.context, HEAD).init(device),
        }
    }

    /// Computes logits `[texts, length, vocabulary]` from tokens `[texts, length]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let mask = causal(&tokens);
        let x = self.tokens.forward(tokens);
        let x = self
            .blocks
            .iter()
            .fold(x, |x, block| block.forward(x, &self.rope, mask.clone()));
        let weights = self.tokens.weight.val().transpose().unsqueeze::<3>();
        self.norm.forward(x).matmul(weights)
    }

    /// [`forward`](Self::forward) with casts written by hand. Products compute in `low`, to which
    /// [`cast_products`](crate::cast_products) has cast their parameters. Norms, rotations, softmax and the additions to the
    /// residuals compute in f32.
    pub fn forward_by_hand(&self, tokens: Tensor<2, Int>, low: FloatDType) -> Tensor<3> {
        let mask = causal(&tokens);
        let x = self.tokens.forward(tokens);
        let x = self.blocks.iter().fold(x, |x, block| {
            block.forward_by_hand(x, &self.rope, mask.clone(), low)
        });
        let weights = self.tokens.weight.val().cast(low);
        let x = self.norm.forward(x).cast(low);
        x.matmul(weights.transpose().unsqueeze::<3>())
            .cast(FloatDType::F32)
    }
}

impl Block {
    fn new(sizes: LlamaSizes, device: &Device) -> Self {
        let LlamaSizes { width, inner, .. } = sizes;
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let norm = || RmsNormConfig::new(width).init(device);
        Self {
            norm_1: norm(),
            query: linear(width, width),
            key: linear(width, HEAD * sizes.groups),
            value: linear(width, HEAD * sizes.groups),
            output: linear(width, width),
            norm_2: norm(),
            swiglu: SwiGluConfig::new(width, inner).init(device),
            down: linear(inner, width),
        }
    }

    fn forward(&self, x: Tensor<3>, rope: &RotaryEncoding, mask: Tensor<4, Bool>) -> Tensor<3> {
        let x = x.clone() + self.attend(self.norm_1.forward(x), rope, mask);
        let y = self.norm_2.forward(x.clone());
        x + self.down.forward(self.swiglu.forward(y))
    }

    fn attend(&self, x: Tensor<3>, rope: &RotaryEncoding, mask: Tensor<4, Bool>) -> Tensor<3> {
        let [query, key, value] =
            [&self.query, &self.key, &self.value].map(|it| heads(it.forward(x.clone())));
        let groups = query.dims()[1] / key.dims()[1];
        let (query, key) = (rotate(rope, query), repeat(rotate(rope, key), groups));
        let scores = query.matmul(key.transpose()).div_scalar(8.0);
        let weights = softmax(scores.mask_fill(mask, -1e4), 3);
        self.output
            .forward(together(weights.matmul(repeat(value, groups))))
    }

    fn forward_by_hand(
        &self,
        x: Tensor<3>,
        rope: &RotaryEncoding,
        mask: Tensor<4, Bool>,
        low: FloatDType,
    ) -> Tensor<3> {
        let y = self.norm_1.forward(x.clone()).cast(low);
        let y = self.attend_by_hand(y, rope, mask, low);
        let x = x + y.cast(FloatDType::F32);
        let y = self.norm_2.forward(x.clone()).cast(low);
        let gate = silu(self.swiglu.linear_inner.forward(y.clone()));
        let y = gate * self.swiglu.linear_outer.forward(y);
        x + self.down.forward(y).cast(FloatDType::F32)
    }

    fn attend_by_hand(
        &self,
        x: Tensor<3>,
        rope: &RotaryEncoding,
        mask: Tensor<4, Bool>,
        low: FloatDType,
    ) -> Tensor<3> {
        let [query, key, value] =
            [&self.query, &self.key, &self.value].map(|it| heads(it.forward(x.clone())));
        let groups = query.dims()[1] / key.dims()[1];
        let (query, key) = (rotate(rope, query), repeat(rotate(rope, key), groups));
        let scores = query.matmul(key.transpose()).div_scalar(8.0);
        let scores = scores.mask_fill(mask, -1e4).cast(FloatDType::F32);
        let weights = softmax(scores, 3).cast(low);
        self.output
            .forward(together(weights.matmul(repeat(value, groups))))
    }
}

/// Which tokens each token does not see, `[texts, 1, length, length]`.
fn causal(tokens: &Tensor<2, Int>) -> Tensor<4, Bool> {
    let [texts, length] = tokens.dims();
    generate_autoregressive_mask(texts, length, &tokens.device())
        .reshape([texts, 1, length, length])
}

/// `[texts, heads, length, 64]` of `[texts, length, width]`.
fn heads(x: Tensor<3>) -> Tensor<4> {
    let [texts, length, width] = x.dims();
    x.reshape([texts, length, width / HEAD, HEAD])
        .swap_dims(1, 2)
}

/// `[texts, length, width]` of `[texts, heads, length, 64]`.
fn together(x: Tensor<4>) -> Tensor<3> {
    let [texts, heads, length, _] = x.dims();
    x.swap_dims(1, 2).reshape([texts, length, heads * HEAD])
}

/// Rotates in f32, the dtype of the angles.
fn rotate(rope: &RotaryEncoding, x: Tensor<4>) -> Tensor<4> {
    let dtype = x.dtype();
    rope.forward(x.cast(FloatDType::F32)).cast(dtype)
}

/// Each head of keys or values, once for each of the queries' heads that share it.
fn repeat(x: Tensor<4>, times: usize) -> Tensor<4> {
    let [texts, heads, length, _] = x.dims();
    x.unsqueeze_dim::<5>(2)
        .expand([texts, heads, times, length, HEAD])
        .reshape([texts, heads * times, length, HEAD])
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::s;

    fn tiny(device: &Device) -> Llama {
        let sizes = LlamaSizes {
            layers: 1,
            width: 128,
            inner: 192,
            groups: 1,
            vocabulary: 11,
            context: 6,
        };
        Llama::new(sizes, device)
    }

    #[test]
    fn parameters_are_as_many_as_smollm2_has() {
        // By the sizes in its configuration, SmolLM2-135M has 134,515,008. A smaller model saves the work of initializing them all.
        let sizes = LlamaSizes {
            layers: 1,
            width: 576,
            inner: 1_536,
            groups: 3,
            vocabulary: 10,
            context: 8,
        };
        let block = Block::new(sizes, &Device::flex()).num_params();
        let model = Llama::new(sizes, &Device::flex()).num_params();
        assert_eq!(model + (49_152 - 10) * 576 + 29 * block, 134_515_008);
    }

    #[test]
    fn what_comes_later_changes_nothing() {
        let device = Device::flex();
        let model = tiny(&device);
        let logits = |last| {
            let tokens = Tensor::<2, Int>::from_data([[1, 2, 3, last]], &device);
            let logits = model.forward(tokens).slice(s![.., 0..3, ..]);
            logits.into_data().try_to_vec::<f32>().unwrap()
        };
        assert_eq!(logits(4), logits(5));
    }

    #[test]
    fn the_order_of_what_comes_before_matters() {
        // Without rotations, attention of one layer could not tell.
        let device = Device::flex();
        let model = tiny(&device);
        let logits = |[first, second]: [i64; 2]| {
            let tokens = Tensor::<2, Int>::from_data([[first, second, 3]], &device);
            let logits = model.forward(tokens).slice(s![.., 2, ..]);
            logits.into_data().try_to_vec::<f32>().unwrap()
        };
        let pairs = logits([1, 2]).into_iter().zip(logits([2, 1]));
        let most = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most > 1e-5, "{most}");
    }
}
