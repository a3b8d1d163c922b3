//! Convolutions and pools.

use super::{Op, table};
use crate::suite::programs::{machine::Machine, picks::Picks, value::Float};
use burn::tensor::{
    Tensor, module,
    ops::{
        AvgPoolOptions, ConvOptions, ConvTransposeOptions, InterpolateMode, InterpolateOptions,
        MaxPoolOptions, UnfoldOptions,
    },
};

/// A rank 3 operand: images with one spatial dimension.
fn lines(machine: &mut Machine, picks: &mut Picks<'_>) -> Option<Tensor<3>> {
    match machine.of_rank(3, picks) {
        Float::R3(x) => Some(x),
        _ => None,
    }
}

/// A rank 4 operand: images.
fn images(machine: &mut Machine, picks: &mut Picks<'_>) -> Option<Tensor<4>> {
    match machine.of_rank(4, picks) {
        Float::R4(x) => Some(x),
        _ => None,
    }
}

/// How a filter moves along a dimension of that size.
struct Moves {
    size: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
}

impl Moves {
    fn pick(along: usize, picks: &mut Picks<'_>) -> Self {
        let size = [1, 2, 3][picks.below(3)];
        let padding = picks.below(size.min(2));
        let dilation = match size > 1 && picks.flag() && along + 2 * padding > 2 * (size - 1) {
            true => 2,
            false => 1,
        };
        let reach = dilation * (size - 1) + 1;
        let size = if reach > along + 2 * padding { 1 } else { size };
        Self {
            size,
            stride: picks.below(2) + 1,
            padding: padding.min(size - 1),
            dilation: if size == 1 { 1 } else { dilation },
        }
    }

    /// Whether the filter fits.
    fn fits(&self, along: usize) -> bool {
        along + 2 * self.padding > self.dilation * (self.size - 1)
    }

    /// Whether a transposed filter leaves something.
    fn leaves(&self, along: usize) -> bool {
        (along - 1) * self.stride + self.dilation * (self.size - 1) + 1 > 2 * self.padding
    }
}

/// In how many groups a convolution divides that many channels.
fn groups(channels: usize, picks: &mut Picks<'_>) -> usize {
    match picks.below(3) {
        0 if channels.is_multiple_of(2) => 2,
        1 if channels <= 8 => channels,
        _ => 1,
    }
}

pub(super) const CONVOLUTIONS: &[Op] = table! {
    Exact conv1d: |m, p| {
        let x = lines(m, p)?;
        let [_, channels, along] = x.dims();
        let it = Some(Moves::pick(along, p)).filter(|it| it.fits(along))?;
        let groups = groups(channels, p);
        let out = groups * (p.below(2) + 1);
        let dims = [out, channels / groups, it.size];
        let weight = m.parameter(p.below(2), &dims).into_rank(dims);
        let bias = p.flag().then(|| m.vector(0, out));
        let options = ConvOptions::new([it.stride], [it.padding], [it.dilation], groups);
        Some(module::conv1d(x, weight, bias, options).into())
    };
    Exact conv2d: |m, p| {
        let x = images(m, p)?;
        let [_, channels, height, width] = x.dims();
        let it = Moves::pick(height.min(width), p);
        let it = Some(it).filter(|it| it.fits(height) && it.fits(width))?;
        let groups = groups(channels, p);
        let out = groups * (p.below(2) + 1);
        let dims = [out, channels / groups, it.size, it.size];
        let weight = m.parameter(p.below(2), &dims).into_rank(dims);
        let bias = p.flag().then(|| m.vector(0, out));
        let options = ConvOptions::new([it.stride; 2], [it.padding; 2], [it.dilation; 2], groups);
        Some(module::conv2d(x, weight, bias, options).into())
    };
    Exact conv_transpose1d: |m, p| {
        let x = lines(m, p)?;
        let [_, channels, along] = x.dims();
        let it = Some(Moves::pick(along, p)).filter(|it| it.leaves(along))?;
        let groups = groups(channels, p);
        let out = p.below(2) + 1;
        let dims = [channels, out, it.size];
        let weight = m.parameter(p.below(2), &dims).into_rank(dims);
        let bias = p.flag().then(|| m.vector(0, groups * out));
        let beyond = [p.below(it.stride)];
        let options =
            ConvTransposeOptions::new([it.stride], [it.padding], beyond, [it.dilation], groups);
        Some(module::conv_transpose1d(x, weight, bias, options).into())
    };
    Exact conv_transpose2d: |m, p| {
        let x = images(m, p)?;
        let [_, channels, height, width] = x.dims();
        let it = Moves::pick(height.min(width), p);
        let it = Some(it).filter(|it| it.leaves(height) && it.leaves(width))?;
        let groups = groups(channels, p);
        let out = p.below(2) + 1;
        let dims = [channels, out, it.size, it.size];
        let weight = m.parameter(p.below(2), &dims).into_rank(dims);
        let bias = p.flag().then(|| m.vector(0, groups * out));
        let beyond = [p.below(it.stride); 2];
        let [stride, padding, dilation] = [it.stride, it.padding, it.dilation].map(|it| [it; 2]);
        let options = ConvTransposeOptions::new(stride, padding, beyond, dilation, groups);
        Some(module::conv_transpose2d(x, weight, bias, options).into())
    };
    Exact unfold: |m, p| {
        let x = images(m, p)?;
        let [_, _, height, width] = x.dims();
        let size = height.min(width).min(2);
        let options = UnfoldOptions::new([1, 1], [0, 0], [1, 1]);
        Some(module::unfold4d(x, [size; 2], options).into())
    };
};

pub(super) const POOLS: &[Op] = table! {
    Exact max_pool1d: |m, p| {
        let x = lines(m, p)?;
        let size = x.dims()[2].min(2);
        let options = MaxPoolOptions::new([size]).with_stride([p.below(2) + 1]);
        Some(module::max_pool1d(x, options).into())
    };
    Exact max_pool2d: |m, p| {
        let x = images(m, p)?;
        let [_, _, height, width] = x.dims();
        let size = [height.min(2), width.min(3)];
        let options = MaxPoolOptions::new(size).with_stride([p.below(2) + 1, 1]);
        Some(module::max_pool2d(x, options).into())
    };
    Exact avg_pool1d: |m, p| {
        let x = lines(m, p)?;
        let size = x.dims()[2].min(2);
        let options = AvgPoolOptions::new([size]).with_stride([p.below(2) + 1]);
        Some(module::avg_pool1d(x, options).into())
    };
    Exact avg_pool2d: |m, p| {
        let x = images(m, p)?;
        let [_, _, height, width] = x.dims();
        let options = AvgPoolOptions::new([height.min(2), width.min(2)]);
        Some(module::avg_pool2d(x, options).into())
    };
    Exact adaptive_avg_pool1d: |m, p| {
        let x = lines(m, p)?;
        let size = x.dims()[2].min(2);
        Some(module::adaptive_avg_pool1d(x, size).into())
    };
    Exact adaptive_avg_pool2d: |m, p| {
        let x = images(m, p)?;
        let size = p.below(2) + 1;
        Some(module::adaptive_avg_pool2d(x, [1, size]).into())
    };
    Rounded interpolate: |m, p| {
        let x = images(m, p)?;
        let mode = match p.flag() {
            true => InterpolateMode::Bilinear,
            false => InterpolateMode::Nearest,
        };
        Some(module::interpolate(x, InterpolateOptions::new(mode).with_output_size([3, 5])).into())
    };
};
