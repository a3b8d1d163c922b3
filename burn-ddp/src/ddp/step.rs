//! Takes the gradients of one step out of Burn's container, and puts averages back.

use std::collections::HashMap;

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::Tensor,
};

use super::{
    gradient::Gradient,
    number::number,
    parameters::{Signature, parameters},
};
use crate::DdpError;

/// A model in one step. Its trained parameters are numbered as slots, last first.
pub(super) struct Step<'a, M> {
    model: &'a M,
    pub(super) trained: &'a [Signature],
    slots: HashMap<ParamId, usize>,
    /// The factor that averages are multiplied by.
    factor: f64,
}

impl<'a, M: Module> Step<'a, M> {
    pub(super) fn new(
        model: &'a M,
        trained: &'a [Signature],
        factor: f64,
    ) -> Result<Self, DdpError> {
        let mut found = parameters(model);
        found.retain(|parameter| parameter.signature.trained);
        found.reverse();
        let same = found.iter().map(|it| &it.signature).eq(trained);
        if !same {
            return Err(DdpError::InvalidArgument(
                "the model's trained parameters have changed; make a new Ddp for it".into(),
            ));
        }
        Ok(Self {
            model,
            trained,
            slots: found.iter().map(|it| it.id).zip(0..).collect(),
            factor,
        })
    }

    /// Takes the gradients out, flattened.
    pub(super) fn take(
        &self,
        gradients: &mut GradientsParams,
    ) -> Result<Vec<Option<Tensor<1>>>, DdpError> {
        let mut taker = Taker {
            slots: &self.slots,
            gradients,
            taken: vec![None; self.trained.len()],
        };
        self.model.visit(&mut taker);
        for (signature, gradient) in self.trained.iter().zip(&taker.taken) {
            if let Some(gradient) = gradient {
                check_fits(gradient, signature)?;
            }
        }
        Ok(taker.taken)
    }

    /// Puts the averages back, in their parameters' shapes.
    pub(super) fn give(&self, gradients: &mut GradientsParams, averages: Vec<Option<Gradient>>) {
        self.model.visit(&mut Giver {
            slots: &self.slots,
            trained: self.trained,
            factor: self.factor,
            gradients,
            averages,
        });
    }

    /// Whether the parameters are marked as distributed.
    pub(super) fn is_marked(&self) -> bool {
        let mut marked = Marked {
            slots: &self.slots,
            all: true,
        };
        self.model.visit(&mut marked);
        marked.all
    }

    /// For each slot, the position at which its gradient arrived at the layer of an
    /// [`Overlap`](super::Overlap), from 1; 0 if this rank has no such gradient. Gradients that the program
    /// recomputed after backward come in the order of the slots.
    pub(super) fn arrivals(&self, gradients: &mut GradientsParams) -> Vec<u32> {
        let mut numbers = Numbers {
            slots: &self.slots,
            gradients,
            found: Vec::new(),
        };
        self.model.visit(&mut numbers);
        numbers.found.sort_unstable();
        let mut arrivals = vec![0; self.trained.len()];
        for ((_, slot), place) in numbers.found.into_iter().zip(1..) {
            arrivals[slot] = place;
        }
        arrivals
    }

    /// The number of elements of the gradients that have [arrived](Self::arrivals).
    pub(super) fn elements(&self, arrivals: &[u32]) -> usize {
        let gradients = self.trained.iter().zip(arrivals).filter(|(_, it)| **it > 0);
        gradients.map(|(it, _)| it.shape.num_elements()).sum()
    }
}

/// Checks that a gradient has the length and type of its parameter.
fn check_fits(gradient: &Tensor<1>, parameter: &Signature) -> Result<(), DdpError> {
    let Signature {
        path, shape, dtype, ..
    } = parameter;
    let expected = (shape.num_elements(), *dtype);
    let found = (gradient.shape().num_elements(), gradient.dtype());
    match found == expected {
        true => Ok(()),
        false => Err(DdpError::InvalidArgument(format!(
            "the gradient of `{path}` has {} elements of type {:?}; expected {} of type {:?}",
            found.0, found.1, expected.0, expected.1
        ))),
    }
}

struct Taker<'a> {
    slots: &'a HashMap<ParamId, usize>,
    gradients: &'a mut GradientsParams,
    taken: Vec<Option<Tensor<1>>>,
}

impl ModuleVisitor for Taker<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let len = gradient.shape().num_elements();
            self.taken[*slot] = Some(gradient.reshape([len]));
        }
    }
}

struct Giver<'a> {
    slots: &'a HashMap<ParamId, usize>,
    trained: &'a [Signature],
    factor: f64,
    gradients: &'a mut GradientsParams,
    averages: Vec<Option<Gradient>>,
}

impl ModuleVisitor for Giver<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        if let Some(average) = self.averages[*slot].take() {
            let Signature { shape, dtype, .. } = &self.trained[*slot];
            let device = param.base().device().without_autodiff();
            let average = average.scaled(self.factor);
            let gradient = average.into_tensor::<D>(shape.clone(), *dtype, &device);
            self.gradients.register(param.id, gradient);
        }
    }
}

struct Numbers<'a> {
    slots: &'a HashMap<ParamId, usize>,
    gradients: &'a mut GradientsParams,
    found: Vec<(Option<u64>, usize)>,
}

impl ModuleVisitor for Numbers<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let (number, gradient) = number(gradient);
            self.found.push((number, *slot));
            self.gradients.register(param.id, gradient);
        }
    }
}

struct Marked<'a> {
    slots: &'a HashMap<ParamId, usize>,
    all: bool,
}

impl ModuleVisitor for Marked<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.all &= !self.slots.contains_key(&param.id) || param.val().is_distributed();
    }
}
