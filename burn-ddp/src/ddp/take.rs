//! Taking gradients out of Burn's container, and putting averages in.

use std::collections::HashMap;

use burn::{
    module::{ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::Tensor,
};

use super::{parameters::Signature, values::Values};
use crate::DdpError;

/// Reads a gradient when asked to.
pub(super) type Read = Box<dyn FnOnce() -> Result<Values, DdpError>>;

/// Takes the gradients out, in the visitors' order.
pub(super) struct Taker<'a> {
    pub(super) slots: &'a HashMap<ParamId, usize>,
    pub(super) gradients: GradientsParams,
    pub(super) taken: Vec<Option<Read>>,
}

impl ModuleVisitor for Taker<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.taken[*slot] = Some(Box::new(|| {
                let data = gradient.try_into_data();
                Values::from_data(data.map_err(|error| DdpError::Device(error.to_string()))?)
            }));
        }
    }
}

/// Puts the averages in.
pub(super) struct Giver<'a> {
    pub(super) slots: &'a HashMap<ParamId, usize>,
    pub(super) trained: &'a [Signature],
    pub(super) gradients: GradientsParams,
    pub(super) averages: Vec<Option<Values>>,
}

impl ModuleVisitor for Giver<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        if let Some(average) = self.averages[*slot].take() {
            let Signature { shape, dtype, .. } = &self.trained[*slot];
            let device = param.base().device().without_autodiff();
            let data = average.into_data(shape.clone(), *dtype);
            let gradient = Tensor::<D>::from_data(data, (&device, *dtype));
            self.gradients.register(param.id, gradient);
        }
    }
}

/// Notes which gradients there are.
pub(super) struct Present<'a> {
    pub(super) slots: &'a HashMap<ParamId, usize>,
    pub(super) gradients: &'a GradientsParams,
    pub(super) present: Vec<u8>,
}

impl ModuleVisitor for Present<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(slot) = self.slots.get(&param.id) {
            self.present[*slot] = self.gradients.get::<D>(param.id).is_some().into();
        }
    }
}
