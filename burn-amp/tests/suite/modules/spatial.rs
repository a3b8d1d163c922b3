//! Layers of images and signals: convolutions, pools, what resizes and rearranges.

use super::{Case, base, case, check};
use burn::{
    nn::{
        Fold4dConfig, PaddingConfig1d, PaddingConfig2d, PixelShuffleConfig, PixelUnshuffleConfig,
        Unfold4dConfig,
        conv::{
            Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
            ConvTranspose3dConfig, DeformConv2dConfig,
        },
        interpolate::{Interpolate1dConfig, Interpolate2dConfig, InterpolateMode},
        pool::{
            AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AdaptiveAvgPool3dConfig,
            AvgPool1dConfig, AvgPool2dConfig, MaxPool1dConfig, MaxPool2dConfig,
        },
    },
    tensor::Device,
};

/// CubeCL's kernels have no backward of the linear mode.
fn mode() -> InterpolateMode {
    match base() == Device::flex() {
        true => InterpolateMode::Linear,
        false => InterpolateMode::Nearest,
    }
}

pub(super) fn cases() -> Vec<Case> {
    [convolutions(), pools(), resizing()]
        .into_iter()
        .flatten()
        .collect()
}

fn convolutions() -> Vec<Case> {
    vec![
        case(
            |device| {
                Conv1dConfig::new(4, 6, 3)
                    .with_padding(PaddingConfig1d::Same)
                    .init(device)
            },
            |m, feed| m.forward(feed.float([2, 4, 8])),
        ),
        case(
            |device| {
                let conv = Conv2dConfig::new([4, 6], [3, 3]).with_groups(2);
                conv.with_padding(PaddingConfig2d::Same).init(device)
            },
            |m, feed| m.forward(feed.float([2, 4, 6, 6])),
        ),
        case(
            |device| Conv3dConfig::new([2, 3], [2, 2, 2]).init(device),
            |m, feed| m.forward(feed.float([2, 2, 4, 4, 4])),
        ),
        case(
            |device| {
                ConvTranspose1dConfig::new([4, 6], 3)
                    .with_stride(2)
                    .init(device)
            },
            |m, feed| m.forward(feed.float([2, 4, 5])),
        ),
        case(
            |device| {
                ConvTranspose2dConfig::new([4, 6], [3, 3])
                    .with_stride([2, 2])
                    .init(device)
            },
            |m, feed| m.forward(feed.float([2, 4, 4, 4])),
        ),
        case(
            |device| ConvTranspose3dConfig::new([2, 3], [2, 2, 2]).init(device),
            |m, feed| m.forward(feed.float([2, 2, 3, 3, 3])),
        ),
        case(
            |device| DeformConv2dConfig::new([2, 3], [2, 2]).init(device),
            |m, feed| {
                let mask = feed.unit([2, 4, 4, 4]);
                m.forward(
                    feed.float([2, 2, 5, 5]),
                    feed.float([2, 8, 4, 4]),
                    Some(mask),
                )
            },
        )
        // CubeCL's gradients of offsets and mask are not Flex's, without autocast too.
        .beside_base(),
    ]
}

fn pools() -> Vec<Case> {
    vec![
        case(
            |_| AdaptiveAvgPool1dConfig::new(3).init(),
            |m, feed| m.forward(feed.float([2, 3, 8])),
        ),
        case(
            |_| AdaptiveAvgPool2dConfig::new([3, 2]).init(),
            |m, feed| m.forward(feed.float([2, 3, 7, 6])),
        ),
        case(
            |_| AdaptiveAvgPool3dConfig::new([2, 2, 2]).init(),
            |m, feed| m.forward(feed.float([2, 2, 4, 5, 4])),
        ),
        case(
            |_| AvgPool1dConfig::new(3).with_stride(2).init(),
            |m, feed| m.forward(feed.float([2, 3, 9])),
        ),
        case(
            |_| AvgPool2dConfig::new([3, 2]).init(),
            |m, feed| m.forward(feed.float([2, 3, 6, 6])),
        ),
        case(
            |_| MaxPool1dConfig::new(3).with_stride(2).init(),
            |m, feed| m.forward(feed.float([2, 3, 9])),
        ),
        case(
            |_| MaxPool2dConfig::new([2, 2]).init(),
            |m, feed| m.forward(feed.float([2, 3, 6, 6])),
        ),
    ]
}

fn resizing() -> Vec<Case> {
    vec![
        case(
            |_| {
                let interpolate = Interpolate1dConfig::new().with_output_size(Some(7));
                interpolate.with_mode(mode()).init()
            },
            |m, feed| m.forward(feed.float([2, 3, 4])),
        ),
        case(
            |_| {
                let interpolate = Interpolate2dConfig::new().with_output_size(Some([7, 6]));
                interpolate.with_mode(mode()).init()
            },
            |m, feed| m.forward(feed.float([2, 3, 4, 4])),
        ),
        case(
            |_| Unfold4dConfig::new([2, 2]).init(),
            |m, feed| m.forward(feed.float([2, 3, 4, 4])),
        ),
        case(
            |_| Fold4dConfig::new([4, 4], [2, 2]).init(),
            |m, feed| m.forward(feed.float([2, 12, 9])),
        ),
        case(
            |_| PixelShuffleConfig::new(2).init(),
            |m, feed| m.forward(feed.float([2, 8, 3, 3])),
        ),
        case(
            |_| PixelUnshuffleConfig::new(2).init(),
            |m, feed| m.forward(feed.float([2, 3, 4, 4])),
        ),
    ]
}

#[test]
fn layers_of_images_are_near_f32() {
    check(cases());
}
