//! ResNet-18 and ResNet-50 of He et al. 2015, "Deep Residual Learning for Image Recognition", table 1
//! (<https://arxiv.org/abs/1512.03385>).

use burn::{
    module::Module,
    nn::{
        BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
        pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig},
    },
    tensor::{Device, FloatDType, Tensor, activation::relu},
};

/// A residual network for large images: a 7x7 convolution, four stages of blocks, the mean over the pixels, and one
/// linear layer.
///
/// ```
/// use benches::models::ResNet;
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let model = ResNet::resnet18(10, &device);
/// assert_eq!(model.forward(Tensor::zeros([1, 3, 32, 32], &device)).dims(), [1, 10]);
/// ```
#[derive(Module, Debug)]
pub struct ResNet {
    stem: ConvNorm,
    max_pool: MaxPool2d,
    blocks: Vec<Block>,
    mean: AdaptiveAvgPool2d,
    head: Linear,
}

/// Convolutions and a shortcut around them.
#[derive(Module, Debug)]
struct Block {
    layers: Vec<ConvNorm>,
    /// `None` if the block keeps the shape.
    shortcut: Option<ConvNorm>,
}

#[derive(Module, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ResNet {
    /// Blocks of two 3x3 convolutions: 11.7 million parameters with 1,000 classes.
    pub fn resnet18(classes: usize, device: &Device) -> Self {
        Self::new(&[2, 2, 2, 2], false, 64, classes, device)
    }

    /// Bottleneck blocks, with the stride in the 3x3 convolution as in torchvision: 25.6 million parameters with
    /// 1,000 classes.
    pub fn resnet50(classes: usize, device: &Device) -> Self {
        Self::new(&[3, 4, 6, 3], true, 64, classes, device)
    }

    /// As many stages as `blocks` has numbers of blocks, the first of `width` channels (four times as many after bottleneck
    /// blocks), each other of twice as many as the one before it.
    pub(super) fn new(
        blocks: &[usize],
        bottleneck: bool,
        width: usize,
        classes: usize,
        device: &Device,
    ) -> Self {
        let mut channels = width;
        let stem = ConvNorm::new(3, width, 7, 2, device);
        let mut all = Vec::new();
        for (stage, count) in blocks.iter().enumerate() {
            let width = width << stage;
            for block in 0..*count {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let block = if bottleneck {
                    Block::bottleneck(channels, width, stride, device)
                } else {
                    Block::basic(channels, width, stride, device)
                };
                all.push(block);
                channels = if bottleneck { 4 * width } else { width };
            }
        }
        Self {
            stem,
            max_pool: MaxPool2dConfig::new([3, 3])
                .with_strides([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(),
            blocks: all,
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(channels, classes).init(device),
        }
    }

    /// Computes logits `[images, classes]` from images `[images, 3, height, width]`.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.features(images, None);
        self.head.forward(x)
    }

    /// [`forward`](Self::forward) with the casts of autocast written by hand. Everything computes in `low`, to which
    /// [`cast_products`](crate::cast_products) has cast the parameters of products, except norms, which compute in f32.
    pub fn forward_by_hand(&self, images: Tensor<4>, low: FloatDType) -> Tensor<2> {
        let x = self.features(images.cast(low), Some(low));
        self.head.forward(x).cast(FloatDType::F32)
    }

    /// If `low` is given, everything but norms computes in it.
    fn features(&self, images: Tensor<4>, low: Option<FloatDType>) -> Tensor<2> {
        let x = self.max_pool.forward(relu(self.stem.forward(images, low)));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x, low));
        self.mean.forward(x).flatten(1, 3)
    }
}

impl Block {
    fn basic(from: usize, to: usize, stride: usize, device: &Device) -> Self {
        let layers = vec![
            ConvNorm::new(from, to, 3, stride, device),
            ConvNorm::new(to, to, 3, 1, device),
        ];
        Self::new(layers, from, to, stride, device)
    }

    fn bottleneck(from: usize, width: usize, stride: usize, device: &Device) -> Self {
        let layers = vec![
            ConvNorm::new(from, width, 1, 1, device),
            ConvNorm::new(width, width, 3, stride, device),
            ConvNorm::new(width, 4 * width, 1, 1, device),
        ];
        Self::new(layers, from, 4 * width, stride, device)
    }

    fn new(layers: Vec<ConvNorm>, from: usize, to: usize, stride: usize, device: &Device) -> Self {
        let shortcut = (from != to).then(|| ConvNorm::new(from, to, 1, stride, device));
        Self { layers, shortcut }
    }

    fn forward(&self, x: Tensor<4>, low: Option<FloatDType>) -> Tensor<4> {
        let shortcut = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x.clone(), low),
            None => x.clone(),
        };
        let last = self.layers.len() - 1;
        let y = self.layers[..last]
            .iter()
            .fold(x, |x, layer| relu(layer.forward(x, low)));
        relu(self.layers[last].forward(y, low) + shortcut)
    }
}

impl ConvNorm {
    /// A convolution without bias that keeps the height and width, or divides them by `stride`, and a normalization.
    fn new(from: usize, to: usize, kernel: usize, stride: usize, device: &Device) -> Self {
        let padding = kernel / 2;
        let conv = Conv2dConfig::new([from, to], [kernel, kernel])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(
                padding, padding, padding, padding,
            ))
            .with_bias(false);
        Self {
            conv: conv.init(device),
            norm: BatchNormConfig::new(to).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>, low: Option<FloatDType>) -> Tensor<4> {
        let x = self.conv.forward(x);
        match low {
            Some(low) => self.norm.forward(x.cast(FloatDType::F32)).cast(low),
            None => self.norm.forward(x),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_as_many_as_torchvision_has() {
        // torchvision.models have 11,689,512 and 25,557,032, and 9,600 and 53,120 running statistics as buffers.
        let device = Device::flex();
        let count = |model: ResNet| model.num_params();
        assert_eq!(count(ResNet::resnet18(1000, &device)), 11_689_512 + 9_600);
        assert_eq!(count(ResNet::resnet50(1000, &device)), 25_557_032 + 53_120);
    }

    #[test]
    fn a_large_image_becomes_logits() {
        let device = Device::flex();
        let model = ResNet::resnet50(7, &device);
        let logits = model.forward(Tensor::zeros([2, 3, 64, 64], &device));
        assert_eq!(logits.dims(), [2, 7]);
    }
}
