//! The vision transformer of Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words"
//! (<https://arxiv.org/abs/2010.11929>), table 1.

use burn::{
    module::{Initializer, Module, Param},
    nn::{
        LayerNorm, LayerNormConfig, Linear, LinearConfig,
        conv::{Conv2d, Conv2dConfig},
        transformer::{TransformerEncoder, TransformerEncoderInput},
    },
    tensor::{Device, FloatDType, Tensor, s},
};

use super::transformer::{blocks, blocks_by_hand};

/// A vision transformer with a class token.
///
/// ```
/// use benches::models::VisionTransformer;
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let model = VisionTransformer::new(1, 64, 16, 32, 10, &device);
/// assert_eq!(model.forward(Tensor::zeros([2, 3, 32, 32], &device)).dims(), [2, 10]);
/// ```
#[derive(Module, Debug)]
pub struct VisionTransformer {
    patches: Conv2d,
    class: Param<Tensor<3>>,
    positions: Param<Tensor<3>>,
    encoder: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

impl VisionTransformer {
    /// ViT-B/16 for images of 224x224: 12 layers of width 768.
    pub fn base(classes: usize, device: &Device) -> Self {
        Self::new(12, 768, 16, 224, classes, device)
    }

    /// ViT-H/14 for images of 224x224: 32 layers of width 1,280. Heads have width 64, where the paper has 80.
    pub fn huge(classes: usize, device: &Device) -> Self {
        Self::new(32, 1_280, 14, 224, classes, device)
    }

    /// `layers` layers of width `width`, for images of height and width `side`, cut into patches of height and width `patch`.
    pub fn new(
        layers: usize,
        width: usize,
        patch: usize,
        side: usize,
        classes: usize,
        device: &Device,
    ) -> Self {
        let tokens = 1 + (side / patch) * (side / patch);
        let normal = Initializer::Normal {
            mean: 0.0,
            std: 0.02,
        };
        Self {
            patches: Conv2dConfig::new([3, width], [patch, patch])
                .with_stride([patch, patch])
                .init(device),
            class: Initializer::Zeros.init([1, 1, width], device),
            positions: normal.init([1, tokens, width], device),
            encoder: blocks(layers, width, device),
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, classes).init(device),
        }
    }

    /// Computes logits `[images, classes]` from images `[images, 3, side, side]`.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.embed(self.patches.forward(images));
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        self.head.forward(self.norm.forward(class_token(x)))
    }

    /// [`forward`](Self::forward) with casts written by hand. Products compute in `low`, to which
    /// [`cast_products`](crate::cast_products) has cast their parameters. Norms, softmax and the additions to the residuals
    /// compute in f32.
    pub fn forward_by_hand(&self, images: Tensor<4>, low: FloatDType) -> Tensor<2> {
        let patches = self.patches.forward(images.cast(low)).cast(FloatDType::F32);
        let x = blocks_by_hand(&self.encoder, self.embed(patches), None, low);
        let class = self.norm.forward(class_token(x));
        self.head.forward(class.cast(low)).cast(FloatDType::F32)
    }

    /// The tokens `[images, tokens, width]` of patches `[images, width, height, width]`, the class token first.
    fn embed(&self, patches: Tensor<4>) -> Tensor<3> {
        let x = patches.flatten::<3>(2, 3).swap_dims(1, 2);
        let [images, _, width] = x.dims();
        let class = self.class.val().expand([images, 1, width]);
        Tensor::cat(vec![class, x], 1) + self.positions.val()
    }
}

fn class_token(x: Tensor<3>) -> Tensor<2> {
    x.slice(s![.., 0..1, ..]).squeeze_dim::<2>(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_as_many_as_torchvision_has() {
        // The vit_b_16 and vit_h_14 of torchvision.models. A single layer saves the work of initializing them all.
        for (layers, width, patch, expected) in
            [(12, 768, 16, 86_567_656), (32, 1_280, 14, 632_045_800)]
        {
            let model = VisionTransformer::new(1, width, patch, 224, 1000, &Device::flex());
            let block = 12 * width * width + 13 * width;
            assert_eq!(model.num_params() + (layers - 1) * block, expected);
        }
    }
}
