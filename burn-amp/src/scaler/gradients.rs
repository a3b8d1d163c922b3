//! One pass over all gradients of a module, which unscales them and probes them for infinities and NaN.

use super::Overflow;
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Device, ElementConversion, FloatDType, Tensor},
};
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

/// One number, which is copied once to every device that has gradients.
pub(super) struct Factor {
    by_device: Vec<(Device, Tensor<1>)>,
    value: Value,
}

enum Value {
    Host(f32),
    Device(Box<Tensor<1>>),
}

impl Factor {
    /// A number that the host knows.
    pub(super) fn host(value: f32) -> Self {
        Self::new(Value::Host(value))
    }

    /// A number that is a tensor of one element on a device.
    pub(super) fn device(value: Tensor<1>) -> Self {
        Self::new(Value::Device(Box::new(value)))
    }

    fn new(value: Value) -> Self {
        Self {
            by_device: Vec::new(),
            value,
        }
    }

    fn on(&mut self, device: Device) -> Tensor<1> {
        if let Some((_, there)) = self.by_device.iter().find(|(known, _)| *known == device) {
            return there.clone();
        }
        // Even the host's number becomes a tensor, so that a gradient that autocast stored in 16 bits is
        // multiplied in f32.
        let there = match &self.value {
            Value::Host(value) => Tensor::from_data([*value], (&device, DType::F32)),
            Value::Device(value) if value.device() == device => *value.clone(),
            Value::Device(value) => value.clone().to_device(&device),
        };
        self.by_device.push((device, there.clone()));
        there
    }

    /// `grad` times the factor. A bf16 gradient is multiplied in f32.
    pub(super) fn times<const D: usize>(&mut self, grad: Tensor<D>) -> Tensor<D> {
        let factor = self.on(grad.device()).reshape([1; D]);
        match grad.dtype() {
            DType::F32 => grad * factor,
            DType::BF16 => (grad.cast(FloatDType::F32) * factor).cast(FloatDType::BF16),
            dtype => grad * factor.cast(dtype),
        }
    }
}

/// Every gradient of `module` times `factor`, unchecked.
pub(super) fn scale<M: Module>(
    grads: GradientsParams,
    module: &M,
    factor: Factor,
) -> GradientsParams {
    let mut scale = Scale {
        grads,
        factor,
        seen: HashSet::new(),
    };
    module.visit(&mut scale);
    scale.grads
}

struct Scale {
    grads: GradientsParams,
    factor: Factor,
    /// The parameters visited so far. One that occurs in several places of the module is visited in each of them.
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            let grad = self.factor.times(grad);
            self.grads.register::<D>(param.id, grad);
        }
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
