//! One pass over all gradients of a module, which unscales them and probes them for infinities and NaN.

use super::Overflow;
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, ElementConversion, FloatDType, Tensor},
};
use burn_layer::Factor;
use std::collections::HashSet;

/// Gradients times a factor, and probes that tell whether they are finite.
pub(super) struct Pass {
    pub(super) grads: GradientsParams,
    /// Gradients of parameters that the module does not have.
    others: GradientsParams,
    /// The path of each parameter whose gradient has a probe.
    names: Vec<String>,
    /// One element for each gradient, on the gradient's device: 0 if all of the gradient is finite, otherwise NaN.
    probes: Vec<Tensor<1>>,
}

/// Multiplies every gradient of the module by `factor`, a single number, and leaves out those of other parameters. The host does
/// not wait.
///
/// # Panics
///
/// When a gradient is f16, because unscaling would lose again what scaling saved.
pub(super) fn multiply<M: Module>(grads: GradientsParams, module: &M, factor: Factor) -> Pass {
    let mut visitor = Multiply {
        factor,
        path: Vec::new(),
        seen: HashSet::new(),
        pass: Pass {
            grads: GradientsParams::new(),
            others: grads,
            names: Vec::new(),
            probes: Vec::new(),
        },
    };
    module.visit(&mut visitor);
    visitor.pass
}

impl Pass {
    /// Whether the module has none of the gradients, or none with elements.
    pub(super) fn is_empty(&self) -> bool {
        self.probes.is_empty()
    }

    /// How many gradients belong to parameters that the module does not have.
    pub(super) fn left_out(&self) -> usize {
        self.others.len()
    }

    /// The probes in one tensor, on the device of the first. `None` without gradients.
    pub(super) fn probes(&self) -> Option<Tensor<1>> {
        let device = self.probes.first()?.device();
        let there = |probe: &Tensor<1>| {
            if probe.device() == device {
                probe.clone()
            } else {
                probe.clone().to_device(&device)
            }
        };
        Some(Tensor::cat(self.probes.iter().map(there).collect(), 0))
    }

    /// The gradients that are not finite, if any. The host waits once for all of them.
    pub(super) fn overflow(&self) -> Option<Overflow> {
        let probes = self.probes()?.into_data();
        let probes = probes.iter::<f32>().map(|probe| probe.elem::<f32>());
        let parameters: Vec<String> = self
            .names
            .iter()
            .zip(probes)
            .filter(|(_, probe)| !probe.is_finite())
            .map(|(name, _)| name.clone())
            .collect();
        (!parameters.is_empty()).then_some(Overflow { parameters })
    }
}

struct Multiply {
    factor: Factor,
    path: Vec<String>,
    seen: HashSet<ParamId>,
    pass: Pass,
}

impl ModuleVisitor for Multiply {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(grad) = self.pass.others.remove::<D>(param.id) else {
            return;
        };
        let path = self.path.join(".");
        assert!(
            grad.dtype() != DType::F16,
            "the gradient of {path} is f16, in which unscaling loses what scaling saved: keep the \
             parameters in f32 and let Autocast choose what is computed in f16"
        );
        if grad.shape().num_elements() == 0 {
            self.pass.grads.register::<D>(param.id, grad);
            return;
        }
        let grad = self.factor.times(grad);
        // 0 times an infinity or a NaN is NaN, and a NaN stays in a sum. Probes are in f32, so that those of
        // f64 and bf16 gradients can be put together.
        let probe = grad.clone().mul_scalar(0.0).sum();
        self.pass.probes.push(probe.cast(FloatDType::F32));
        self.pass.names.push(path);
        self.pass.grads.register::<D>(param.id, grad);
    }
}
