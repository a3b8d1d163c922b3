//! A tensor of delayed scaling's state, as mappers and records see it.

use burn::module::{Param, ParamId};
use burn::tensor::{DType, FloatDType, GradientCheckpointingStrategy, Tensor};

/// A tensor of the record. It is never tracked by autodiff.
#[derive(Clone, Debug)]
pub(super) struct Buffer {
    pub(super) id: ParamId,
    pub(super) value: Tensor<1>,
}

impl Buffer {
    pub(super) fn new(value: Tensor<1>) -> Self {
        Self {
            id: ParamId::new(),
            value,
        }
    }

    /// This tensor as a parameter, with the autodiff strategy of the layer. A scale is recorded in units of `unit`.
    pub(super) fn param(
        &self,
        unit: Option<f32>,
        autodiff: Option<GradientCheckpointingStrategy>,
    ) -> Param<Tensor<1>> {
        let value = match autodiff {
            Some(strategy) => {
                let value = self.value.clone().autodiff();
                value.with_gradient_checkpointing_strategy(strategy)
            }
            None => self.value.clone(),
        };
        let param = Param::initialized(self.id, value);
        let Some(unit) = unit else {
            return param;
        };
        let before = self.value.clone();
        let param = param.load_mapper(move |value| {
            let value = value.without_autodiff().cast(FloatDType::F32);
            scale_or(before.clone(), value, unit)
        });
        match unit == 1.0 {
            true => param,
            false => param.save_mapper(move |value| value / unit),
        }
    }

    /// This buffer after a mapper has changed its parameter. It stays f32 and untracked, whatever the mapper does with
    /// parameters, and a value that a narrower dtype could not hold stays what it was.
    pub(super) fn mapped(&self, param: Param<Tensor<1>>, is_scale: bool) -> Self {
        let (id, value, _) = param.consume();
        let value = value.without_autodiff();
        if value.dtype() == DType::F32 {
            return Self { id, value };
        }
        let value = value.cast(FloatDType::F32);
        let before = self.value.clone().to_device(&value.device());
        let value = match is_scale {
            true => scale_or(before, value, 1.0),
            false => value
                .clone()
                .mask_where(value.is_finite().bool_not(), before),
        };
        Self { id, value }
    }
}

/// `scale` times `unit` where `scale` is finite and above 0, and `before` elsewhere.
fn scale_or(before: Tensor<1>, scale: Tensor<1>, unit: f32) -> Tensor<1> {
    let positive = scale.clone().greater_elem(0.0);
    let usable = positive.bool_and(scale.clone().is_finite());
    let scale = (scale * unit).clamp_max(f32::MAX);
    scale.mask_where(usable.bool_not(), before)
}
