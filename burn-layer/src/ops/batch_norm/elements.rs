//! What a batch normalization sums, as it is computed.

use super::Norm;
use crate::{LayeredFloat, channels::sum_by_channel, float::Origin};
use burn_backend::{Backend, DType, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use std::sync::Arc;

/// Elements of `[batch, channels, ..]`, as they are computed. A number of each channel is `[1, channels, 1, ..]`.
#[derive(Clone)]
pub(crate) enum Elements<B: Backend> {
    /// A tensor as it is. The identity is that of an input, which is no gradient.
    Of(LayeredFloat<B>, Option<Origin>),
    Centered(Arc<Centered<B>>),
    /// The square of a centered tensor.
    Squared(Arc<Centered<B>>),
    Normalized(Arc<Normalized<B>>),
    /// A tensor times a normalized one.
    Product(LayeredFloat<B>, Arc<Normalized<B>>),
}

/// A centered tensor times a number of each channel.
pub(crate) struct Normalized<B: Backend> {
    pub(super) centered: Arc<Centered<B>>,
    pub(super) scale: LayeredFloat<B>,
}

/// A tensor minus a number of each channel.
pub(crate) struct Centered<B: Backend> {
    pub(super) x: LayeredFloat<B>,
    pub(super) mean: LayeredFloat<B>,
    /// The variance of each channel, where the mean is that of the same tensor, and a kernel computed both.
    pub(super) variance: Option<FloatTensor<B>>,
}

impl<B: BackendIr> Elements<B> {
    /// The sum by channel, `[1, channels, 1, ..]`, of all elements times `by`, in f32.
    pub(super) fn sum(&self, by: f64) -> FloatTensor<B> {
        let sum = sum_by_channel::<B>(self.wide(), by);
        match self {
            Self::Normalized(normalized) | Self::Product(_, normalized) => {
                B::float_mul(sum, wide(&normalized.scale))
            }
            _ => sum,
        }
    }

    /// The mean of the elements by channel, if they are squares of which a kernel computed it.
    pub(super) fn variance(&self) -> Option<FloatTensor<B>> {
        match self {
            Self::Squared(centered) => centered.variance.clone(),
            _ => None,
        }
    }

    /// The elements in f32, less a factor of each channel.
    fn wide(&self) -> FloatTensor<B> {
        match self {
            Self::Of(x, _) => wide(x),
            Self::Centered(centered) => centered.wide(),
            Self::Normalized(normalized) => normalized.centered.wide(),
            Self::Squared(centered) => {
                let centered = centered.wide();
                B::float_mul(centered.clone(), centered)
            }
            Self::Product(factor, normalized) => {
                let centered = normalized.centered.wide();
                B::float_mul(wide(factor), centered)
            }
        }
    }
}

impl<B: BackendIr> Centered<B> {
    /// In f32.
    fn wide(&self) -> FloatTensor<B> {
        B::float_sub(wide(&self.x), wide(&self.mean))
    }
}

/// A tensor in f32. A statistic is as it was computed, because a view would end the kernel.
fn wide<B: BackendIr>(tensor: &LayeredFloat<B>) -> FloatTensor<B> {
    match tensor.norm() {
        Some(Norm::Statistic(statistic)) if statistic.along.shape() == tensor.shape() => {
            statistic.along.clone()
        }
        _ => tensor.in_dtype(Some(DType::F32)),
    }
}
