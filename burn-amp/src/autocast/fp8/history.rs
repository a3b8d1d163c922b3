//! Delayed scaling of layers that have a name.

use super::linear::Role;
use crate::autocast::nan_guard::Name;
use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{FloatDType, Shape},
};
use burn_fp8::{Fp8Format, Fp8Ops, Operand, recipe::DelayedScaling};
use burn_layer::Run;
use std::{
    any::Any,
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

/// A linear layer as far as a device can tell it from others: by the names around it and its size.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    names: Vec<String>,
    size: [usize; 2],
}

impl Place {
    pub(super) fn new(run: &Run<'_>, size: [usize; 2]) -> Self {
        let names = run.scopes::<Name>().into_iter();
        Self {
            names: names.map(|name| name.0.clone()).collect(),
            size,
        }
    }

    pub(super) fn is_named(&self) -> bool {
        !self.names.is_empty()
    }
}

/// The amaxes of earlier casts, by place and role; a [`History`] of the backend each.
#[derive(Debug, Default)]
pub(super) struct Histories(Mutex<HashMap<(Place, Role), Box<dyn Any + Send>>>);

struct History<B: Backend> {
    amaxes: FloatTensor<B>,
    scale: FloatTensor<B>,
    /// How often amaxes were taken in.
    steps: usize,
}

impl Histories {
    /// Cast by the scale that the history gives, and take the tensor's amax into it.
    pub(super) fn cast<B: Backend + Fp8Ops>(
        &self,
        tensor: FloatTensor<B>,
        format: Fp8Format,
        recipe: &DelayedScaling,
        place: &Place,
        role: Role,
    ) -> Operand<B> {
        let mut histories = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let history = histories.entry((place.clone(), role)).or_insert_with(|| {
            let (device, dtype) = (tensor.device(), FloatDType::F32);
            Box::new(History::<B> {
                amaxes: B::float_zeros(Shape::new([recipe.amax_history_len]), &device, dtype),
                scale: B::float_ones(Shape::new([1]), &device, dtype),
                steps: 0,
            })
        });
        let history: &mut History<B> = history
            .downcast_mut()
            .expect("a device has one backend underneath");
        let (operand, amax) = Operand::cast_with(tensor, history.scale.clone(), format);
        let (amaxes, scale) = B::fp8_update_scale(
            history.amaxes.clone(),
            history.scale.clone(),
            amax,
            recipe.update(format),
        );
        history.amaxes = amaxes;
        if history.steps.is_multiple_of(recipe.interval) {
            history.scale = scale;
        }
        history.steps += 1;
        operand
    }
}
