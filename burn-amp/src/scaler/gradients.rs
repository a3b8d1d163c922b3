//! Unscaling all gradients of a module and finding those that overflowed.

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{ElementConversion, Tensor},
};
use core::fmt;

/// Gradients that overflowed: the step is to be skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overflow {
    /// The paths of the parameters whose gradients hold an infinity or a NaN.
    pub parameters: Vec<String>,
}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        let shown = self.parameters.iter().take(SHOWN);
        let shown: Vec<_> = shown.map(String::as_str).collect();
        write!(f, "the gradients of {} overflowed", shown.join(", "))?;
        match self.parameters.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and those of {more} more parameters"),
        }
    }
}

/// Gradients multiplied by the inverse of the loss scale.
#[derive(Debug)]
pub struct Unscaled {
    /// The gradients, of every parameter that has one.
    pub grads: GradientsParams,
    /// Whether some of them are infinite or NaN.
    pub overflow: Option<Overflow>,
}

/// Multiplies every gradient by `factor`. Whether they are finite is read back once, for all of
/// them together.
pub(super) fn unscale<M: Module>(grads: GradientsParams, module: &M, factor: f32) -> Unscaled {
    let mut visitor = Unscale {
        grads,
        factor,
        path: Vec::new(),
        names: Vec::new(),
        probes: Vec::new(),
    };
    module.visit(&mut visitor);
    let overflow = visitor.overflow();
    Unscaled {
        grads: visitor.grads,
        overflow,
    }
}

struct Unscale {
    grads: GradientsParams,
    factor: f32,
    path: Vec<String>,
    names: Vec<String>,
    /// One element a gradient: 0 where all of it is finite, NaN otherwise.
    probes: Vec<Tensor<1>>,
}

impl Unscale {
    fn overflow(&mut self) -> Option<Overflow> {
        if self.probes.is_empty() {
            return None;
        }
        let probes = Tensor::cat(core::mem::take(&mut self.probes), 0).into_data();
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

impl ModuleVisitor for Unscale {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.grads.remove::<D>(param.id) else {
            return;
        };
        // By a tensor of f32: a gradient that autocast stored in 16 bits is divided in f32.
        let factor = Tensor::<1>::from_floats([self.factor], &grad.device());
        let grad = grad * factor.reshape([1; D]);
        // 0 times an infinity or a NaN is NaN, and a NaN stays in a sum.
        self.probes.push(grad.clone().mul_scalar(0.0).sum());
        self.names.push(self.path.join("."));
        self.grads.register::<D>(param.id, grad);
    }
}
