//! Parameters that are in several places of a model, such as an embedding that is also the weight of the last layer.

use std::collections::HashSet;

use burn::{
    module::{Module, ModuleMapper, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Tensor},
};

use super::parameters::parameters;

/// The model with one shared tensor for all places of a parameter that have the same contents. With a separate tensor in
/// each place, backward would compute a gradient for each, and the optimizer would get one of them instead of their sum.
pub(super) fn tie<M: Module>(model: M) -> M {
    let mut seen = HashSet::new();
    let ids = parameters(&model).into_iter().map(|it| it.id);
    let several: HashSet<ParamId> = ids.filter(|id| !seen.insert(*id)).collect();
    match several.is_empty() {
        true => model,
        false => model.map(&mut Tie {
            several,
            first: GradientsParams::new(),
        }),
    }
}

struct Tie {
    /// The parameters that are in several places.
    several: HashSet<ParamId>,
    /// The tensors in the first of these places.
    first: GradientsParams,
}

impl ModuleMapper for Tie {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.several.contains(&param.id) {
            return param;
        }
        let own = param.base();
        match self.first.get::<D>(param.id) {
            Some(first) if is_same(&first, &own) => param.map(|_| first),
            Some(_) => param,
            None => {
                self.first.register(param.id, own);
                param
            }
        }
    }
}

fn is_same<const D: usize>(first: &Tensor<D>, other: &Tensor<D>) -> bool {
    let kind = |it: &Tensor<D>| (it.shape(), it.dtype(), it.is_require_grad());
    if kind(first) != kind(other) || matches!(first.dtype(), DType::QFloat(_)) {
        return false;
    }
    let [first, other] = [first, other].map(|it| it.clone().without_autodiff());
    first.equal(other).all().into_scalar()
}
