//! What a batch normalization sums, as it is computed.

use super::{BatchNorms, Norm};
use crate::{LayeredFloat, channels::sum_by_channel, float::Origin};
use burn_backend::{Backend, DType, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use parking_lot::Mutex;
use std::sync::Arc;

/// Elements of `[batch, channels, ..]`, as they are computed. A number of each channel is `[1, channels, 1, ..]`.
#[derive(Clone)]
pub(crate) enum Elements<B: Backend> {
    /// A tensor as it is.
    Of(Arc<Plain<B>>),
    Centered(Arc<Centered<B>>),
    /// The square of a centered tensor.
    Squared(Arc<Centered<B>>),
    Normalized(Arc<Normalized<B>>),
    /// A tensor times a normalized one.
    Product(Arc<Product<B>>),
}

/// A tensor, and what it is.
pub(crate) struct Plain<B: Backend> {
    pub(super) x: LayeredFloat<B>,
    pub(super) origin: Origin,
    pub(super) is_gradient: bool,
}

/// A tensor times a normalized one.
pub(crate) struct Product<B: Backend> {
    pub(super) factor: LayeredFloat<B>,
    pub(super) normalized: Arc<Normalized<B>>,
    /// The sums by channel of the factor, and of its product with the centered tensor, once a kernel has computed them.
    sums: Mutex<Option<[FloatTensor<B>; 2]>>,
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
            Self::Normalized(normalized) => B::float_mul(sum, wide(&normalized.scale)),
            Self::Product(product) => B::float_mul(sum, wide(&product.normalized.scale)),
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
            Self::Of(plain) => wide(&plain.x),
            Self::Centered(centered) => centered.wide(),
            Self::Normalized(normalized) => normalized.centered.wide(),
            Self::Squared(centered) => {
                let centered = centered.wide();
                B::float_mul(centered.clone(), centered)
            }
            Self::Product(product) => {
                let centered = product.normalized.centered.wide();
                B::float_mul(wide(&product.factor), centered)
            }
        }
    }
}

impl<B: BackendIr> Product<B> {
    pub(super) fn new(factor: LayeredFloat<B>, normalized: Arc<Normalized<B>>) -> Self {
        Self {
            factor,
            normalized,
            sums: Mutex::default(),
        }
    }

    /// The sums by channel of the factor, and of the product, by a kernel.
    pub(super) fn sums(&self, by: BatchNorms<B>) -> [FloatTensor<B>; 2] {
        let Normalized { centered, scale } = &*self.normalized;
        let mut sums = self.sums.lock();
        let [sum, projection] = sums.get_or_insert_with(|| {
            let [factor, x] =
                [&self.factor, &centered.x].map(|tensor| tensor.clone().into_storage());
            (by.sums)([factor, x], wide(&centered.mean))
        });
        [sum.clone(), B::float_mul(projection.clone(), wide(scale))]
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
