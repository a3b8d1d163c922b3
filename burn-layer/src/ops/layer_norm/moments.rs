//! [`Moments`] of rows, and what is made of them.

use super::role::Of;
use crate::{LayeredFloat, float::Origin};
use burn_backend::{Backend, tensor::FloatTensor};
use std::sync::Arc;

/// The moments of the rows of a tensor. Numbers of rows know these only: those that a program collects, such as the norms of its
/// batches, would hold what they are of.
pub(crate) struct Moments<B: Backend> {
    pub(super) around: Around<B>,
    /// The means of the squares of `c`.
    pub(super) variance: FloatTensor<B>,
}

/// A tensor with the moments of its rows.
pub(crate) struct Centered<B: Backend> {
    pub(super) x: LayeredFloat<B>,
    pub(super) moments: Arc<Moments<B>>,
}

/// What the variance of a row is taken around.
pub(crate) enum Around<B: Backend> {
    /// The mean, in a layer normalization.
    Mean(FloatTensor<B>),
    /// Zero, in an RMS normalization, of the tensor with this identity.
    Zero(Origin),
}

/// Variances, and the small number that is added to them.
#[derive(Clone)]
pub(crate) struct Positive<B: Backend> {
    pub(super) moments: Arc<Moments<B>>,
    pub(super) epsilon: f64,
}

/// Their roots.
pub(crate) struct Deviations<B: Backend> {
    pub(super) of: Positive<B>,
    pub(super) deviation: FloatTensor<B>,
}

/// A tensor with the deviations of its rows.
pub(crate) struct Normalized<B: Backend> {
    pub(super) x: LayeredFloat<B>,
    pub(super) by: Arc<Deviations<B>>,
}

impl<B: Backend> Positive<B> {
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.moments, &other.moments) && self.epsilon == other.epsilon
    }
}

impl<B: Backend> Deviations<B> {
    pub(super) fn are_of(&self, centered: &Centered<B>) -> bool {
        Arc::ptr_eq(&self.of.moments, &centered.moments)
    }

    /// Whether they are of the tensor with that identity, and `c` is that tensor itself.
    pub(super) fn are_of_input(&self, identity: usize) -> bool {
        matches!(&self.of.moments.around, Around::Zero(of) if of.as_ptr() as usize == identity)
    }

    /// The means of the rows, if they are subtracted.
    pub(super) fn mean(&self) -> Option<FloatTensor<B>> {
        match &self.of.moments.around {
            Around::Mean(mean) => Some(mean.clone()),
            Around::Zero(_) => None,
        }
    }
}

impl<B: Backend> Normalized<B> {
    pub(super) fn new(x: &LayeredFloat<B>, by: &Arc<Deviations<B>>) -> Of<B> {
        Arc::new(Self {
            x: x.alone(),
            by: by.clone(),
        })
    }
}
