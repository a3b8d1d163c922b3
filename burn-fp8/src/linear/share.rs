//! Shares the amaxes of a whole model over the ranks, in one call.

use core::error::Error;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::state::{AMAX, CONTAINER};
use crate::recipe::AmaxReducer;

/// Shares the amaxes of a step over the ranks, for all layers with delayed scaling, in one call of the `reducer`. The next
/// forward pass takes them into the histories, and its scales are the same on all ranks.
///
/// Use this for layers without a [reducer](super::Fp8Linear::with_amax_reducer) of their own, which makes one call per layer and
/// pass, and requires every rank to run the same layers. Call it on every rank between backward and the next forward pass. Each
/// step must be a single pass: of several passes, only the amaxes of the last are shared. Transformer Engine too reduces all
/// layers at once, when the outermost `autocast` ends.
///
/// # Errors
/// Any error that keeps the group from answering.
///
/// # Panics
/// If the layers are on several devices.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp8::{Fp8LinearConfig, recipe::AmaxReducer, share_amaxes};
///
/// /// Stands for a group, another rank of which saw larger numbers.
/// #[derive(Debug)]
/// struct Doubled;
///
/// impl AmaxReducer for Doubled {
///     fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn std::error::Error + Send + Sync>> {
///         Ok(amaxes * 2.0)
///     }
/// }
///
/// let device = Device::flex().autodiff();
/// let layer = Fp8LinearConfig::new(4, 2).init(&device);
/// layer.forward(Tensor::<2>::ones([3, 4], &device) * 7.0);
/// let layer = share_amaxes(layer, &Doubled)?;
/// let [input, _weight, _gradient] = layer.scaling_state().unwrap();
/// assert_eq!(input.amax, 14.0);
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub fn share_amaxes<M: Module>(
    module: M,
    reducer: &dyn AmaxReducer,
) -> Result<M, Box<dyn Error + Send + Sync>> {
    let mut own = Own::default();
    module.visit(&mut own);
    if own.amaxes.is_empty() {
        return Ok(module);
    }
    let all = reducer.max(Tensor::cat(own.amaxes, 0))?;
    Ok(module.map(&mut Shared {
        all,
        taken: 0,
        at_amax: false,
    }))
}

fn is_amax(name: &str, container: &str) -> bool {
    name == AMAX && container == CONTAINER
}

/// Collects the amaxes of a model, in the order of its layers.
#[derive(Default)]
struct Own {
    amaxes: Vec<Tensor<1>>,
    at_amax: bool,
}

impl ModuleVisitor for Own {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.at_amax = is_amax(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.at_amax = false;
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.at_amax {
            self.amaxes.push(param.val().reshape([1]));
        }
    }
}

/// Replaces each amax by its maximum over the ranks.
struct Shared {
    all: Tensor<1>,
    taken: usize,
    at_amax: bool,
}

impl ModuleMapper for Shared {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.at_amax = is_amax(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.at_amax = false;
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.at_amax {
            return param;
        }
        let amax = self.all.clone().slice(self.taken..self.taken + 1);
        self.taken += 1;
        param.map(|_| amax.reshape([1; D]))
    }
}
