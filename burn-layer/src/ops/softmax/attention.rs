//! How scores of attention are scaled and masked, and their gradient.

use super::super::call::Call;
use super::{
    Scale, Softmaxes,
    logits::Scores,
    role::{Gradient, Role, scores},
};
use crate::{LayeredFloat, LayeredTensor, deferred::Deferred, source::Later};
use burn_backend::{DType, TensorMetadata, tensor::BoolTensor};
use burn_ir::BackendIr;
use std::sync::Arc;

impl<B: BackendIr> Call<B> {
    /// Notes that scores of attention are scaled, or scales their gradient in the kernel that computes it.
    pub(in crate::ops) fn scales(
        &mut self,
        x: &LayeredFloat<B>,
        number: f64,
    ) -> Option<LayeredFloat<B>> {
        let scale = Scale::of(self.op, number);
        if self.scales_scores() && self.makes_scores(x) {
            self.role = Some(Arc::new(Role::Scores(Arc::new(Scores::new(x, scale)))));
            return None;
        }
        let (gradient, masked) = match x.role().map(|role| &**role)? {
            Role::OfMasked(gradient) => (gradient, true),
            Role::OfScores(gradient) => (gradient, false),
            _ => return None,
        };
        let is_masked = gradient.of.scores()?.is_masked();
        let dtype = x.storage_dtype();
        let stored = self.plan.stored(dtype);
        let softmaxes = self.layer().mechanisms.get::<Softmaxes<B>>()?;
        let fits = stored == dtype || stored == DType::F32;
        if is_masked != masked || !fits || self.watched || self.plan.own {
            return None;
        }
        let tensor = gradient.backward(softmaxes, masked, scale);
        if stored == dtype {
            return Some(self.ends(&gradient.of, tensor));
        }
        // The products that take it want it as it is.
        Some(self.widened(tensor, x.dtype(), stored))
    }

    /// Notes that scores of attention are masked, or masks their gradient in the kernel that computes it.
    pub(in crate::ops) fn masks(
        &mut self,
        x: &LayeredFloat<B>,
        mask: &LayeredTensor<BoolTensor<B>>,
        fill: f64,
    ) -> Option<LayeredFloat<B>> {
        if let Some(Role::OfScores(gradient)) = x.role().map(|role| &**role) {
            let scores = gradient.of.scores()?;
            let dtype = x.storage_dtype();
            let stored = self.plan.stored(dtype);
            let softmaxes = self.layer().mechanisms.get::<Softmaxes<B>>()?;
            let plain = stored == dtype && !self.watched && !self.plan.own;
            if !(scores.is_masked_by(mask) && fill == 0.0 && plain) {
                return None;
            }
            self.role = Some(Arc::new(Role::OfMasked(gradient.clone())));
            return Some(self.of_scores(softmaxes, gradient.clone(), true));
        }
        if !self.makes_scores(x) {
            return None;
        }
        let masked = match scores(x) {
            Some(scores) => scores.masked(mask, fill),
            None => self.scores_of(x)?.masked(mask, fill),
        };
        self.role = Some(Arc::new(Role::Scores(Arc::new(masked?))));
        None
    }

    /// The gradient of scores, which waits for what is done with it.
    pub(super) fn of_scores(
        &self,
        softmaxes: Softmaxes<B>,
        gradient: Arc<Gradient<B>>,
        masked: bool,
    ) -> LayeredFloat<B> {
        let x = gradient.of.x.clone();
        let form = (x.shape(), x.storage_dtype());
        let value = Deferred::new(move || gradient.backward(softmaxes, masked, Scale::Nothing));
        self.waiting(Later::Deferred(value), &x, form)
    }
}
