//! GPT-2 of Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

use burn::{
    module::{Initializer, Module, Param},
    nn::{
        Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig,
        attention::generate_autoregressive_mask,
        transformer::{TransformerEncoder, TransformerEncoderInput},
    },
    tensor::{Device, FloatDType, Int, Tensor, s},
};

use super::transformer::{blocks, blocks_by_hand};

/// A language model whose last layer shares the weights of its token embedding.
///
/// ```
/// use benches::models::Gpt2;
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let model = Gpt2::new(1, 64, 100, 16, &device);
/// assert_eq!(model.forward(Tensor::zeros([2, 8], &device)).dims(), [2, 8, 100]);
/// ```
#[derive(Module, Debug)]
pub struct Gpt2 {
    tokens: Embedding,
    positions: Param<Tensor<3>>,
    blocks: TransformerEncoder,
    norm: LayerNorm,
}

impl Gpt2 {
    /// GPT-2 small: 12 layers of width 768, 50,257 tokens, a context of 1,024.
    pub fn small(device: &Device) -> Self {
        Self::new(12, 768, 50_257, 1_024, device)
    }

    /// A model with `layers` layers of width `width`, `vocabulary` kinds of tokens, and texts of up to `context` tokens.
    pub fn new(
        layers: usize,
        width: usize,
        vocabulary: usize,
        context: usize,
        device: &Device,
    ) -> Self {
        let normal = Initializer::Normal {
            mean: 0.0,
            std: 0.02,
        };
        Self {
            tokens: EmbeddingConfig::new(vocabulary, width)
                .with_initializer(normal.clone())
                .init(device),
            positions: normal.init([1, context, width], device),
            blocks: blocks(layers, width, device),
            norm: LayerNormConfig::new(width).init(device),
        }
    }

    /// Computes logits `[texts, length, vocabulary]` from tokens `[texts, length]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [texts, length] = tokens.dims();
        let mask = generate_autoregressive_mask(texts, length, &tokens.device());
        let x = self.embed(tokens);
        let x = self
            .blocks
            .forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let weights = self.tokens.weight.val().transpose().unsqueeze::<3>();
        self.norm.forward(x).matmul(weights)
    }

    /// [`forward`](Self::forward) with casts written by hand. Products compute in `low`, to which
    /// [`cast_products`](crate::cast_products) has cast their parameters. Norms, softmax and the additions to the residuals
    /// compute in f32.
    pub fn forward_by_hand(&self, tokens: Tensor<2, Int>, low: FloatDType) -> Tensor<3> {
        let [texts, length] = tokens.dims();
        let mask = generate_autoregressive_mask(texts, length, &tokens.device());
        let mask = mask.reshape([texts, 1, length, length]);
        let x = blocks_by_hand(&self.blocks, self.embed(tokens), Some(mask), low);
        let weights = self.tokens.weight.val().cast(low);
        let x = self.norm.forward(x).cast(low);
        x.matmul(weights.transpose().unsqueeze::<3>())
            .cast(FloatDType::F32)
    }

    fn embed(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, length] = tokens.dims();
        let positions = self.positions.val().slice(s![.., 0..length, ..]);
        self.tokens.forward(tokens) + positions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_as_many_as_gpt2_has() {
        // The gpt2 of transformers has 124,439,808. A smaller model saves the work of initializing them all.
        let [width, vocabulary, context] = [768, 50_257, 1_024];
        let model = Gpt2::new(1, width, 10, 8, &Device::flex());
        let rest = (vocabulary - 10) * width + (context - 8) * width;
        let block = 12 * width * width + 13 * width;
        assert_eq!(model.num_params() + rest + 11 * block, 124_439_808);
    }

    #[test]
    fn what_comes_later_changes_nothing() {
        let device = Device::flex();
        let model = Gpt2::new(1, 64, 11, 6, &device);
        let logits = |last| {
            let tokens = Tensor::<2, Int>::from_data([[1, 2, 3, last]], &device);
            let logits = model.forward(tokens).slice(s![.., 0..3, ..]);
            logits.into_data().try_to_vec::<f32>().unwrap()
        };
        assert_eq!(logits(4), logits(5));
    }
}
