//! [`Scores`]: products of attention that are scaled and masked before they are a softmax's input.

use super::{super::call::Call, Softmaxes};
use crate::{LayeredFloat, LayeredTensor, Op, float::Part};
use burn_backend::{
    Backend, DType, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn_ir::BackendIr;

/// What a softmax is of: a tensor, after it is scaled and masked. Each step is rounded to the tensor's dtype.
#[cfg_attr(not(feature = "cubecl"), expect(dead_code, reason = "kernels read it"))]
pub(crate) struct Logits<B: Backend> {
    pub(crate) x: FloatTensor<B>,
    pub(crate) scale: Scale,
    /// Of four dimensions, the last one as long as that of `x`, and each of the others too, or 1.
    pub(crate) mask: Option<Mask<B>>,
}

/// What is filled, and with what.
#[cfg_attr(not(feature = "cubecl"), expect(dead_code, reason = "kernels read it"))]
pub(crate) struct Mask<B: Backend> {
    pub(crate) elements: BoolTensor<B>,
    pub(crate) fill: f32,
}

/// What elements are multiplied with, or divided by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scale {
    Nothing,
    By(f32),
    Over(f32),
}

impl Scale {
    pub(super) fn of(op: Op, number: f64) -> Self {
        match op {
            Op::float_div_scalar => Self::Over(number as f32),
            _ => Self::By(number as f32),
        }
    }
}

impl<B: Backend> Logits<B> {
    pub(super) fn of(x: FloatTensor<B>) -> Self {
        Self {
            x,
            scale: Scale::Nothing,
            mask: None,
        }
    }
}

/// A product that was scaled, and may have been masked, or waits for both.
#[derive(Clone)]
pub(crate) struct Scores<B: Backend> {
    product: LayeredFloat<B>,
    scale: Scale,
    mask: Option<(LayeredTensor<BoolTensor<B>>, f32)>,
}

impl<B: Backend> Scores<B> {
    pub(super) fn new(product: &LayeredFloat<B>, scale: Scale) -> Self {
        Self {
            product: product.alone(),
            scale,
            mask: None,
        }
    }

    /// Also masked, if it was not yet, and the mask is one of these scores'.
    pub(super) fn masked(&self, mask: &LayeredTensor<BoolTensor<B>>, fill: f64) -> Option<Self> {
        let (shape, of) = (mask.shape(), self.product.shape());
        let broadcast = |dim: usize| shape[dim] == of[dim] || (dim < 3 && shape[dim] == 1);
        let fits = shape.num_dims() == 4 && of.num_dims() == 4 && (0..4).all(broadcast);
        (fits && self.mask.is_none()).then(|| Self {
            mask: Some((mask.clone(), fill as f32)),
            ..self.clone()
        })
    }

    pub(super) fn is_masked(&self) -> bool {
        self.mask.is_some()
    }

    pub(super) fn is_masked_by(&self, mask: &LayeredTensor<BoolTensor<B>>) -> bool {
        let own = self.mask.as_ref();
        own.is_some_and(|(own, _)| own.identity() == mask.identity())
    }

    pub(super) fn logits(&self) -> Logits<B> {
        Logits {
            x: self.product.clone().into_storage(),
            scale: self.scale,
            mask: self.mask.as_ref().map(|(mask, fill)| Mask {
                elements: mask.clone().into_storage(),
                fill: *fill,
            }),
        }
    }
}

impl<B: BackendIr> Call<B> {
    /// Whether the op scales or masks what a product of attention made, in forward, without changing its dtype.
    pub(super) fn makes_scores(&self, x: &LayeredFloat<B>) -> bool {
        let dtype = x.storage_dtype();
        let stored = self.plan.stored(dtype);
        let floats = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        let layer = self.layer();
        x.shape().num_dims() == 4
            && floats
            && stored == dtype
            && !self.watched
            && !self.plan.own
            && layer.is_fused()
            && !layer.is_in_backward()
            && layer.mechanisms.get::<Softmaxes<B>>().is_some()
    }

    /// The scores that a product is, before anything is done with it.
    pub(super) fn scores_of(&self, x: &LayeredFloat<B>) -> Option<Scores<B>> {
        let product = x.part() == Some(Part::Product);
        product.then(|| Scores::new(x, Scale::Nothing))
    }
}
