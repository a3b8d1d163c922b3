//! The residual network for CIFAR of He et al. 2015, "Deep Residual Learning for Image Recognition", section 4.2
//! (<https://arxiv.org/abs/1512.03385>), in plain Burn modules.

use std::sync::Arc;

use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, s};
use burn_ddp::{ProcessGroup, SyncBatchNorm};
use burn_fp8::recipe::{AmaxReducer, Fp8Recipe};
use burn_fp8::{Fp8Error, Fp8Linear};

use crate::images::{CHANNELS, CLASSES};

/// Settings of a [`ResNet`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use examples::resnet::ResNetConfig;
///
/// let device = Device::flex();
/// let model = ResNetConfig::new(20, 16).init(&device);
/// let logits = model.forward(Tensor::zeros([2, 3, 32, 32], &device));
/// assert_eq!(logits.dims(), [2, 10]);
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct ResNetConfig {
    /// The number of layers with weights: 6n + 2 for n blocks per stage (8, 14, 20, 32, 44, 56, 110).
    pub depth: usize,
    /// The number of channels of the first stage. The second stage has twice as many, the third four times as many.
    pub width: usize,
}

/// Two convolutions and a shortcut around them.
#[derive(Module, Debug)]
pub struct Block {
    conv1: Conv2d,
    norm1: Norm,
    conv2: Conv2d,
    norm2: Norm,
    stride: usize,
    new_channels: usize,
}

/// A residual network for 32x32 images: one convolution, three stages of blocks with 32x32, 16x16 and 8x8 pixels,
/// the mean over the pixels, and one linear layer.
///
/// The shortcuts have no parameters (option A): at the start of the second and third stage, a shortcut takes every second
/// pixel, and the new channels are zero.
#[derive(Module, Debug)]
pub struct ResNet {
    conv: Conv2d,
    norm: Norm,
    blocks: Vec<Block>,
    pool: AdaptiveAvgPool2d,
    head: Head,
}

/// Batch normalization, with the statistics of one rank's batch, or of the batches of all ranks.
#[derive(Module, Debug)]
pub enum Norm {
    /// Burn's batch normalization.
    Local(BatchNorm),
    /// The synchronized batch normalization of `burn-ddp`.
    Sync(SyncBatchNorm),
}

/// The linear layer at the end, in the device's number format or in fp8.
#[derive(Module, Debug)]
pub enum Head {
    /// Burn's linear layer.
    Linear(Linear),
    /// The linear layer of `burn-fp8`.
    Fp8(Fp8Linear),
}

impl ResNetConfig {
    /// The number of blocks in each of the three stages, or `None` if no such network has this depth.
    pub fn blocks_per_stage(&self) -> Option<usize> {
        (self.depth >= 8 && self.depth % 6 == 2).then(|| (self.depth - 2) / 6)
    }

    /// A network with random weights.
    ///
    /// # Panics
    /// If the depth is not 6n + 2, or the width is 0.
    pub fn init(&self, device: &Device) -> ResNet {
        let blocks_per_stage = self
            .blocks_per_stage()
            .expect("a depth of 6n + 2: 8, 14, 20, 32, ...");
        let mut blocks = Vec::with_capacity(3 * blocks_per_stage);
        let mut channels = self.width;
        for (stage, width) in [self.width, 2 * self.width, 4 * self.width]
            .into_iter()
            .enumerate()
        {
            for block in 0..blocks_per_stage {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                blocks.push(Block::new(channels, width, stride, device));
                channels = width;
            }
        }
        ResNet {
            conv: conv3x3(CHANNELS, self.width, 1, device),
            norm: Norm::new(self.width, device),
            blocks,
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: Head::Linear(LinearConfig::new(channels, CLASSES).init(device)),
        }
    }
}

impl ResNet {
    /// Computes logits `[images, CLASSES]` from images `[images, CHANNELS, SIDE, SIDE]`.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv.forward(images)));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        let x = self.pool.forward(x).flatten(1, 3);
        match &self.head {
            Head::Linear(head) => head.forward(x),
            Head::Fp8(head) => head.forward(x),
        }
    }

    /// This network, with batch normalization over the batches of all ranks of `group`.
    pub fn with_sync_batch_norm(mut self, group: &ProcessGroup) -> Self {
        self.norm = self.norm.synchronized(group);
        for block in &mut self.blocks {
            block.norm1 = block.norm1.clone().synchronized(group);
            block.norm2 = block.norm2.clone().synchronized(group);
        }
        self
    }

    /// This network, with its last layer in fp8. `reducer` keeps the scales the same on all ranks.
    ///
    /// # Errors
    /// If the recipe is invalid.
    pub fn with_fp8_head(
        mut self,
        recipe: impl Into<Fp8Recipe>,
        reducer: Arc<dyn AmaxReducer>,
    ) -> Result<Self, Fp8Error> {
        if let Head::Linear(head) = self.head {
            let head = Fp8Linear::from_linear(head, recipe)?.with_amax_reducer(reducer);
            self.head = Head::Fp8(head);
        }
        Ok(self)
    }
}

impl Norm {
    fn new(channels: usize, device: &Device) -> Self {
        Self::Local(BatchNormConfig::new(channels).init(device))
    }

    fn synchronized(self, group: &ProcessGroup) -> Self {
        match self {
            Self::Local(norm) => Self::Sync(SyncBatchNorm::new(&norm, group)),
            Self::Sync(norm) => Self::Sync(norm),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        match self {
            Self::Local(norm) => norm.forward(x),
            Self::Sync(norm) => norm.forward(x),
        }
    }
}

impl Block {
    fn new(channels: usize, width: usize, stride: usize, device: &Device) -> Self {
        Self {
            conv1: conv3x3(channels, width, stride, device),
            norm1: Norm::new(width, device),
            conv2: conv3x3(width, width, 1, device),
            norm2: Norm::new(width, device),
            stride,
            new_channels: width - channels,
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = relu(self.norm1.forward(self.conv1.forward(x.clone())));
        let y = self.norm2.forward(self.conv2.forward(y));
        relu(y + self.shortcut(x))
    }

    fn shortcut(&self, x: Tensor<4>) -> Tensor<4> {
        if self.stride == 1 {
            return x;
        }
        let x = x.slice(s![.., .., ..;2, ..;2]);
        let [images, _, height, width] = x.dims();
        let zeros = Tensor::zeros([images, self.new_channels, height, width], &x.device());
        Tensor::cat(vec![x, zeros], 1)
    }
}

/// A 3x3 convolution without bias, initialized as in He et al. 2015b, that keeps (or, with stride 2, halves) the height and
/// width.
fn conv3x3(from: usize, to: usize, stride: usize, device: &Device) -> Conv2d {
    Conv2dConfig::new([from, to], [3, 3])
        .with_stride([stride, stride])
        .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
        .with_bias(false)
        .with_initializer(Initializer::KaimingNormal {
            gain: 2.0_f64.sqrt(),
            fan_out_only: true,
        })
        .init(device)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Distribution;

    use super::*;
    use crate::parameters::Parameters;

    #[test]
    fn parameters_are_as_many_as_the_paper_counts() {
        // He et al. 2015, table 6: 0.27M, 0.46M, 0.66M, 0.85M.
        let count = |depth, width| {
            let model = ResNetConfig::new(depth, width).init(&Device::flex().autodiff());
            Parameters::of(&model).count
        };
        for (depth, millions) in [(20, "0.27"), (32, "0.46"), (44, "0.66"), (56, "0.85")] {
            assert_eq!(
                format!("{:.2}", count(depth, 16) as f64 / 1e6),
                millions,
                "ResNet-{depth}"
            );
        }
        let convolutions = 9 * (3 * 2 + 2 * 2 + 2 * 2 + 2 * 4 + 4 * 4 + 4 * 8 + 8 * 8);
        let norms = 2 * (3 * 2 + 2 * 4 + 2 * 8);
        assert_eq!(count(8, 2), convolutions + norms + 8 * 10 + 10);
    }

    #[test]
    fn only_depths_of_6n_plus_2() {
        let blocks = |depth| ResNetConfig::new(depth, 16).blocks_per_stage();
        assert_eq!(
            [blocks(8), blocks(20), blocks(110)],
            [Some(1), Some(3), Some(18)]
        );
        for depth in [0, 2, 7, 9, 18, 34, 101] {
            assert_eq!(blocks(depth), None, "{depth}");
        }
    }

    #[test]
    fn a_shortcut_takes_every_second_pixel_and_adds_zero_channels() {
        let device = Device::flex();
        let block = Block::new(2, 4, 2, &device);
        let x = Tensor::<4>::random([1, 2, 6, 6], Distribution::Default, &device);
        let y: Vec<f32> = block.shortcut(x.clone()).into_data().try_to_vec().unwrap();
        let x: Vec<f32> = x.into_data().try_to_vec().unwrap();
        for (i, value) in y.into_iter().enumerate() {
            let (channel, row, column) = (i / 9, i / 3 % 3, i % 3);
            let expected = if channel < 2 {
                x[channel * 36 + row * 2 * 6 + column * 2]
            } else {
                0.0
            };
            assert_eq!(value, expected);
        }
    }

    #[test]
    fn gradients_reach_every_parameter() {
        use burn::optim::GradientsParams;
        let device = Device::flex().autodiff();
        let model = ResNetConfig::new(8, 4).init(&device);
        let images = Tensor::random([4, 3, 32, 32], Distribution::Default, &device);
        let grads = model.forward(images).powf_scalar(2.0).mean().backward();
        // 7 convolutions, 7 norms with two parameters each, and the head's weight and bias.
        assert_eq!(GradientsParams::from_grads(grads, &model).len(), 7 + 14 + 2);
    }
}
