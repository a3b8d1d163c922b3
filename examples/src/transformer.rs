//! A small vision transformer after Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words"
//! (<https://arxiv.org/abs/2010.11929>), in plain Burn modules.

use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use crate::images::{CHANNELS, CLASSES, SIDE};

/// The height and width of a patch. An image has 4x4 patches.
const PATCH: usize = 8;
const PATCHES: usize = (SIDE / PATCH) * (SIDE / PATCH);

/// Settings of a [`Transformer`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use examples::transformer::TransformerConfig;
///
/// let device = Device::flex();
/// let model = TransformerConfig::new(2, 32).init(&device);
/// let logits = model.forward(Tensor::zeros([5, 3, 32, 32], &device));
/// assert_eq!(logits.dims(), [5, 10]);
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct TransformerConfig {
    /// The number of layers of the encoder.
    pub layers: usize,
    /// The size of a patch's embedding: a multiple of the number of heads.
    pub width: usize,
    /// The number of attention heads.
    #[config(default = 4)]
    pub heads: usize,
}

/// A vision transformer for 32x32 images: patches of 8x8 pixels, a learned position for each, an
/// encoder that normalizes first, the mean over the patches, and one linear layer. It has no dropout.
#[derive(Module, Debug)]
pub struct Transformer {
    embedding: Conv2d,
    positions: Param<Tensor<3>>,
    encoder: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

impl TransformerConfig {
    /// A transformer with random weights.
    ///
    /// # Panics
    /// If the width is not a multiple of the number of heads.
    pub fn init(&self, device: &Device) -> Transformer {
        let Self {
            layers,
            width,
            heads,
        } = *self;
        let positions = Initializer::Normal {
            mean: 0.0,
            std: 0.02,
        };
        Transformer {
            embedding: Conv2dConfig::new([CHANNELS, width], [PATCH, PATCH])
                .with_stride([PATCH, PATCH])
                .init(device),
            positions: positions.init([1, PATCHES, width], device),
            encoder: TransformerEncoderConfig::new(width, 4 * width, heads, layers)
                .with_dropout(0.0)
                .with_norm_first(true)
                .init(device),
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, CLASSES).init(device),
        }
    }
}

impl Transformer {
    /// Computes logits `[images, 10]` from images `[images, 3, 32, 32]`.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let patches: Tensor<3> = self.embedding.forward(images).flatten(2, 3);
        let x = patches.swap_dims(1, 2) + self.positions.val();
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        let mean: Tensor<2> = self.norm.forward(x).mean_dim(1).squeeze_dim(1);
        self.head.forward(mean)
    }
}

#[cfg(test)]
mod tests {
    use burn::optim::GradientsParams;
    use burn::tensor::{Distribution, Tolerance};

    use super::*;
    use crate::parameters::Parameters;

    #[test]
    fn parameters_are_as_many_as_the_layers_have() {
        let model = TransformerConfig::new(3, 8).init(&Device::flex().autodiff());
        let (width, inner, pixels) = (8, 4 * 8, 3 * 8 * 8);
        let attention = 4 * (width * width + width);
        let feed_forward = width * inner + inner + inner * width + width;
        let layer = attention + feed_forward + 2 * 2 * width;
        let ends = pixels * width + width + 16 * width + 2 * width + width * 10 + 10;
        assert_eq!(Parameters::of(&model).count, 3 * layer + ends);
    }

    #[test]
    fn gradients_reach_every_parameter() {
        let device = Device::flex().autodiff();
        let model = TransformerConfig::new(2, 8).init(&device);
        let images = Tensor::random([2, 3, 32, 32], Distribution::Default, &device);
        let grads = model.forward(images).square().mean().backward();
        // Each layer has 4 linear layers of attention, 2 of the feed-forward part, and 2 norms, with two
        // tensors each. The ends are convolution, norm and head, with two tensors each, and the positions.
        assert_eq!(GradientsParams::from_grads(grads, &model).len(), 2 * 16 + 7);
    }

    /// Without positions, the order of the patches makes no difference. With positions, it does.
    #[test]
    fn positions_tell_the_patches_apart() {
        let device = Device::flex();
        let mut model = TransformerConfig::new(1, 8).init(&device);
        let images = Tensor::random([1, 3, 32, 32], Distribution::Default, &device);
        // Swaps the upper and the lower half, each of which has two rows of patches.
        let halves = images.clone().chunk(2, 2);
        let swapped = Tensor::cat(vec![halves[1].clone(), halves[0].clone()], 2);
        let both = |model: &Transformer| {
            let [a, b] = [images.clone(), swapped.clone()].map(|x| model.forward(x).into_data());
            (a, b)
        };
        let (a, b) = both(&model);
        assert_ne!(a, b);
        model.positions = model.positions.map(|positions| positions.zeros_like());
        let (a, b) = both(&model);
        a.assert_approx_eq::<f32>(&b, Tolerance::absolute(1e-5));
    }
}
