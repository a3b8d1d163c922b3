//! ResNet-18 of He et al. 2015, "Deep Residual Learning for Image Recognition", table 1
//! (<https://arxiv.org/abs/1512.03385>), in plain Burn modules.

use burn::{
    module::Module,
    nn::{
        BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
        pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig},
    },
    tensor::{Device, Tensor, activation::relu},
};

/// A residual network for large images: a 7x7 convolution, four stages of two blocks, the mean over the pixels, one
/// linear layer.
///
/// ```
/// use benches::ResNet18;
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let model = ResNet18::new(10, &device);
/// assert_eq!(model.forward(Tensor::zeros([1, 3, 32, 32], &device)).dims(), [1, 10]);
/// ```
#[derive(Module, Debug)]
pub struct ResNet18 {
    conv: Conv2d,
    norm: BatchNorm,
    max_pool: MaxPool2d,
    blocks: Vec<Block>,
    mean: AdaptiveAvgPool2d,
    head: Linear,
}

/// Two 3x3 convolutions and a shortcut around them.
#[derive(Module, Debug)]
struct Block {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    /// Where the shape changes.
    shortcut: Option<(Conv2d, BatchNorm)>,
}

impl ResNet18 {
    /// A network with random weights.
    pub fn new(classes: usize, device: &Device) -> Self {
        let stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)];
        let blocks = stages.into_iter().flat_map(|(from, to, stride)| {
            [
                Block::new(from, to, stride, device),
                Block::new(to, to, 1, device),
            ]
        });
        Self {
            conv: conv(3, 64, 7, 2, device),
            norm: BatchNormConfig::new(64).init(device),
            max_pool: MaxPool2dConfig::new([3, 3])
                .with_strides([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(),
            blocks: blocks.collect(),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(512, classes).init(device),
        }
    }

    /// Logits `[images, classes]` of images `[images, 3, height, width]`.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv.forward(images)));
        let x = self.max_pool.forward(x);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(self.mean.forward(x).flatten(1, 3))
    }
}

impl Block {
    fn new(from: usize, to: usize, stride: usize, device: &Device) -> Self {
        let norm = || BatchNormConfig::new(to).init(device);
        Self {
            conv1: conv(from, to, 3, stride, device),
            norm1: norm(),
            conv2: conv(to, to, 3, 1, device),
            norm2: norm(),
            shortcut: (from != to).then(|| (conv(from, to, 1, stride, device), norm())),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = relu(self.norm1.forward(self.conv1.forward(x.clone())));
        let y = self.norm2.forward(self.conv2.forward(y));
        let x = match &self.shortcut {
            Some((conv, norm)) => norm.forward(conv.forward(x)),
            None => x,
        };
        relu(x + y)
    }
}

/// A convolution without bias that keeps the pixels, or divides them by `stride`.
fn conv(from: usize, to: usize, kernel: usize, stride: usize, device: &Device) -> Conv2d {
    let padding = kernel / 2;
    Conv2dConfig::new([from, to], [kernel, kernel])
        .with_stride([stride, stride])
        .with_padding(PaddingConfig2d::Explicit(
            padding, padding, padding, padding,
        ))
        .with_bias(false)
        .init(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_as_many_as_torchvision_has() {
        // torchvision.models.resnet18(): 11,689,512 parameters; here with 9,600 buffers of running statistics.
        let model = ResNet18::new(1000, &Device::flex());
        assert_eq!(model.num_params(), 11_689_512 + 9_600);
    }
}
