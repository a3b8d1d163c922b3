//! Layer and RMS normalizations in training, where the backend underneath has [kernels](LayerNorms) for them.
//!
//! They do not reach a layered device as one op in training: Burn's autodiff takes them apart, and computes their gradients op by op.
//! Here each of these ops only says what its result is, a [`RowNorm`], and waits until it is needed. The first, the mean, computes the
//! variance too; the last op of backward computes the gradient. What comes between is not computed, unless the program needs it for
//! something else.
//!
//! Of an input in f32, forward reads 4 bytes an element for the moments, and 4 for the result. Backward reads 4 and the gradient, adds
//! what comes to the input from elsewhere, such as around a residual block, and writes 4; and reads both once more for the gradient of
//! the scale.
//!
//! An RMS normalization is one around zero instead of the mean. It begins with the input's squares, and the terms of its gradient are added
//! to those that the input already has.

mod moments;
mod role;

use super::{
    call::Call,
    softmax::widest,
    sum_of_rows::{in_f32, sum_of_rows_of},
};
use crate::{LayeredFloat, Op, recent::GiveUp};
use burn_backend::{Backend, DType, TensorMetadata, tensor::FloatTensor};
use burn_ir::BackendIr;
use moments::{Around, Deviations, Moments, Normalized};
pub(crate) use role::RowNorm;
use role::{Gradient, Step, is_ones};
use std::sync::Arc;

/// Recognizes the ops of layer normalizations, and computes what needs their kernels.
macro_rules! layer_norm {
    ($call:ident, float_mean_dim, $x:ident: Float, $dim:ident: [usize]) => {
        layer_norm!(@ $call.means_of_rows(&$x, $dim))
    };
    ($call:ident, float_sum_dim, $x:ident: Float, $dim:ident: [usize]) => {
        layer_norm!(@ $call.sums_for_norm(&$x, &[$dim]))
    };
    ($call:ident, float_sum_dims, $x:ident: Float, $dims:ident: [&[usize]]) => {
        layer_norm!(@ $call.sums_for_norm(&$x, $dims))
    };
    ($call:ident, float_sqrt, $x:ident: Float) => {
        layer_norm!(@ $call.deviations(&$x))
    };
    ($call:ident, float_neg, $x:ident: Float) => { $call.normalizes_on(&$x); };
    ($call:ident, float_recip, $x:ident: Float) => { $call.normalizes_on(&$x); };
    ($call:ident, float_add_scalar, $x:ident: Float, $value:ident: [Scalar]) => { $call.normalizes_on(&$x); };
    ($call:ident, float_mul_scalar, $x:ident: Float, $value:ident: [Scalar]) => { $call.normalizes_on(&$x); };
    ($call:ident, float_div_scalar, $x:ident: Float, $value:ident: [Scalar]) => { $call.normalizes_on(&$x); };
    ($call:ident, float_powf_scalar, $x:ident: Float, $value:ident: [Scalar]) => { $call.normalizes_on(&$x); };
    ($call:ident, float_sub, $x:ident: Float, $y:ident: Float) => {
        layer_norm!(@ $call.joins_norm(&$x, &$y))
    };
    ($call:ident, float_add, $x:ident: Float, $y:ident: Float) => {
        layer_norm!(@ $call.joins_norm(&$x, &$y))
    };
    ($call:ident, float_mul, $x:ident: Float, $y:ident: Float) => {
        layer_norm!(@ $call.joins_norm(&$x, &$y))
    };
    ($call:ident, float_div, $x:ident: Float, $y:ident: Float) => {
        layer_norm!(@ $call.joins_norm(&$x, &$y))
    };
    (@ $tensor:expr) => {
        if let Some(tensor) = $tensor {
            return tensor;
        }
    };
    ($call:ident, $($other:tt)*) => {};
}
pub(super) use layer_norm;

/// How a backend computes layer and RMS normalizations by kernels of its own. A row is along the last dimension; a number of each row has
/// a last dimension of 1, and is f32.
pub(crate) struct LayerNorms<B: Backend> {
    /// The most elements of a tensor: kernels count them.
    pub(crate) most: usize,
    /// The mean and the variance of each row.
    pub(crate) moments: fn(FloatTensor<B>) -> [FloatTensor<B>; 2],
    /// The mean of the squares of each row.
    pub(crate) mean_squares: fn(FloatTensor<B>) -> FloatTensor<B>,
    /// The gradient of the input.
    pub(crate) backward: fn(NormBackward<B>) -> FloatTensor<B>,
}

/// What the gradient of a normalized tensor's input is computed from: `(g - mean(g) - n mean(g n)) / deviation + added`, where `n` is the
/// normalized tensor, and `g` is `gradient scale`. Where no mean was subtracted, that of `g` is not either. It has the dtype of `x`, or
/// that of `added` if it is wider.
#[cfg_attr(not(feature = "cubecl"), expect(dead_code, reason = "kernels read it"))]
pub(crate) struct NormBackward<B: Backend> {
    pub(crate) x: FloatTensor<B>,
    /// Numbers of each row.
    pub(crate) mean: Option<FloatTensor<B>>,
    pub(crate) deviation: FloatTensor<B>,
    pub(crate) gradient: FloatTensor<B>,
    /// A row, in f32.
    pub(crate) scale: Option<FloatTensor<B>>,
    pub(crate) added: Option<FloatTensor<B>>,
}

impl<B: Backend> Clone for LayerNorms<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for LayerNorms<B> {}

impl<B: BackendIr> Call<B> {
    /// The kernels, if the op may be part of a layer normalization.
    fn layer_norms(&self, stored: DType) -> Option<LayerNorms<B>> {
        self.of_wide(stored)?.mechanisms.get()
    }

    /// The same for an op on an input alone, which may also be computed as that is stored, in the 16 bits of a product.
    fn layer_norms_of_input(&self, stored: DType) -> Option<LayerNorms<B>> {
        let layer = self.layer.as_deref().filter(|layer| layer.is_fused())?;
        match self.is_plain(stored) {
            true => layer.mechanisms.get(),
            false => self.layer_norms(stored),
        }
    }

    /// The mean of each row of an activation, with the variance that a norm needs next; or that variance.
    pub(super) fn means_of_rows(
        &mut self,
        x: &LayeredFloat<B>,
        dim: usize,
    ) -> Option<LayeredFloat<B>> {
        let dtype = x.storage_dtype();
        let layer_norms = self.layer_norms(dtype)?;
        let shape = x.shape();
        if dim + 1 != shape.num_dims() {
            return None;
        }
        let of_network = x.is_computed() && !x.is_gradient();
        let floats = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        let counted = (1..=layer_norms.most).contains(&shape.num_elements());
        if !(of_network && floats && counted) || shape.num_dims() < 2 || shape[dim] < 2 {
            return None;
        }
        match x.row_norm() {
            Some(RowNorm::Squared(of)) => {
                let variance = of.moments.variance.clone();
                self.row_norm = Some(Arc::new(RowNorm::Variance(of.moments.clone())));
                return Some(self.float(variance));
            }
            Some(RowNorm::SquaredInput(input, origin)) => {
                let variance = (layer_norms.mean_squares)(input.alone().into_storage());
                self.row_norm = Some(Arc::new(RowNorm::Variance(Arc::new(Moments {
                    around: Around::Zero(origin.clone()),
                    variance: variance.clone(),
                }))));
                return Some(self.float(variance));
            }
            _ => {}
        }
        let [mean, variance] = (layer_norms.moments)(x.clone().into_storage());
        let moments = Arc::new(Moments {
            around: Around::Mean(mean.clone()),
            variance,
        });
        self.row_norm = Some(Arc::new(RowNorm::Mean(x.origin(), moments)));
        Some(self.float(mean))
    }

    /// The deviation of each row.
    pub(super) fn deviations(&mut self, x: &LayeredFloat<B>) -> Option<LayeredFloat<B>> {
        let Some(RowNorm::Positive(of)) = x.row_norm() else {
            return None;
        };
        self.layer_norms(x.storage_dtype())?;
        let deviation = B::float_sqrt(x.clone().into_storage());
        self.row_norm = Some(Arc::new(RowNorm::Deviation(Arc::new(Deviations {
            of: of.clone(),
            deviation: deviation.clone(),
        }))));
        Some(self.float(deviation))
    }

    /// Notes what the result of an op on `x` is.
    pub(super) fn normalizes_on(&mut self, x: &LayeredFloat<B>) {
        let op = self.as_negation();
        let number = self.constants.first().filter(|_| op != Op::float_neg);
        let row_norm = match (op, x.row_norm()) {
            (Op::float_mul_scalar, None) if is_ones(x) => {
                let columns = x.shape().last().copied().unwrap_or(1);
                let fraction = number.map(|number| number * columns as f64);
                let is_one = fraction.is_some_and(|one| (one - 1.0).abs() < 1e-6);
                is_one.then_some(RowNorm::Fraction)
            }
            (Op::float_neg, None) if x.is_computed() && !x.is_gradient() => {
                let backward = self.layer().is_in_backward();
                backward.then(|| RowNorm::NegInput(Box::new(x.alone()), x.origin()))
            }
            (op, row_norm) => row_norm.and_then(|row_norm| row_norm.after(op, number)),
        };
        let stored = x.storage_dtype();
        let kernels = match row_norm {
            Some(RowNorm::NegInput(..)) => self.layer_norms_of_input(stored),
            Some(_) => self.layer_norms(stored),
            None => None,
        };
        if let (Some(row_norm), Some(_)) = (row_norm, kernels) {
            self.row_norm = Some(Arc::new(row_norm));
        }
    }

    /// Notes what the result of an op on `x` and `y` is, or computes it if it is the last op of a norm's backward.
    pub(super) fn joins_norm(
        &mut self,
        x: &LayeredFloat<B>,
        y: &LayeredFloat<B>,
    ) -> Option<LayeredFloat<B>> {
        let step = Step::of(self.op, x, y)?;
        let stored = widest([x.storage_dtype(), y.storage_dtype()]);
        let layer_norms = match step {
            Step::RowNorm(RowNorm::SquaredInput(..)) => self.layer_norms_of_input(stored)?,
            _ => self.layer_norms(stored)?,
        };
        match step {
            Step::RowNorm(row_norm) => {
                self.row_norm = Some(Arc::new(row_norm));
                None
            }
            Step::Backward(gradient, added) => {
                let x = gradient.x.as_ref()?;
                let tensor = (layer_norms.backward)(gradient.backward(x, added.as_deref()));
                if let Some(value) = x.value() {
                    value.give_up();
                }
                Some(self.float(tensor))
            }
        }
    }

    /// The sums of rows that are known, those that wait, or the gradient of a norm's scale.
    pub(super) fn sums_for_norm(
        &mut self,
        x: &LayeredFloat<B>,
        dims: &[usize],
    ) -> Option<LayeredFloat<B>> {
        let row_norm = x.row_norm()?;
        self.layer_norms(x.storage_dtype())?;
        let (shape, last) = (x.shape(), x.shape().num_dims() - 1);
        match row_norm {
            // These sums, once more.
            RowNorm::OfDeviation(_) | RowNorm::OfVariance(_) | RowNorm::OfMean(_)
                if dims.iter().all(|&dim| shape[dim] == 1) =>
            {
                Some(x.clone())
            }
            RowNorm::Projected(gradient, of) if dims.iter().copied().eq(0..last) => {
                let sum = of.projections(gradient, dims);
                Some(self.float(sum))
            }
            row_norm if dims == [last] => {
                self.row_norm = Some(Arc::new(row_norm.summed()?));
                None
            }
            _ => None,
        }
    }
}

impl<B: BackendIr> Normalized<B> {
    /// The sums along dimensions of a gradient times the normalized tensor.
    fn projections(&self, gradient: &LayeredFloat<B>, dims: &[usize]) -> FloatTensor<B> {
        let x = &self.x;
        let [of, by] = [gradient.clone().into_computed(), x.clone().into_storage()];
        let deviation = self.by.deviation.clone();
        let Some(mean) = self.by.mean() else {
            let inputs = [of, by, deviation];
            return sum_of_rows_of::<B, 3>(x.layer(), inputs, dims, |[gradient, x, deviation]| {
                let [gradient, x] = [gradient, x].map(in_f32::<B>);
                B::float_mul(gradient, B::float_div(x, deviation))
            });
        };
        let inputs = [of, by, mean, deviation];
        sum_of_rows_of::<B, 4>(x.layer(), inputs, dims, |[gradient, x, mean, deviation]| {
            let [gradient, x] = [gradient, x].map(in_f32::<B>);
            let normalized = B::float_div(B::float_sub(x, mean), deviation);
            B::float_mul(gradient, normalized)
        })
    }
}

impl<B: BackendIr> Gradient<B> {
    /// What the gradient of the input `x` is computed from, with another tensor that is added.
    fn backward(&self, x: &LayeredFloat<B>, added: Option<&LayeredFloat<B>>) -> NormBackward<B> {
        let (gradient, scale) = match self.gradient.row_norm() {
            Some(RowNorm::Scaled(gradient, scale)) => (&**gradient, Some(scale)),
            _ => (&self.gradient, None),
        };
        NormBackward {
            x: x.clone().into_storage(),
            mean: self.by.mean(),
            deviation: self.by.deviation.clone(),
            gradient: gradient.clone().into_computed(),
            scale: scale.map(|scale| scale.in_dtype(Some(DType::F32))),
            added: added.map(|added| added.clone().into_computed()),
        }
    }
}
