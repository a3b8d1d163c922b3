//! Multiplies all gradients of a module by a number.

use super::widen;
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Device, Tensor},
};
use std::collections::HashSet;

/// Every gradient of `module` times `factor`; once for a parameter that occurs in several places. Gradients of other
/// parameters stay as they are. The host does not wait.
///
/// ```
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Tensor}};
/// use burn_layer::{Factor, scale_gradients};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(2, 1).with_bias(false).init(&device);
/// let loss = model.forward(Tensor::<2>::ones([1, 2], &device)).sum(); // two gradients of 1
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let gradients = scale_gradients(gradients, &model, Factor::host(0.25));
/// let weight = gradients.get::<2>(model.weight.id).unwrap();
/// assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [0.25; 2]);
/// ```
pub fn scale_gradients<M: Module>(
    gradients: GradientsParams,
    module: &M,
    factor: Factor,
) -> GradientsParams {
    let mut scale = Scale {
        gradients,
        factor,
        seen: HashSet::new(),
    };
    module.visit(&mut scale);
    scale.gradients
}

/// One number, which is copied once to every device that has gradients.
pub struct Factor {
    by_device: Vec<(Device, Tensor<1>)>,
    value: Value,
}

enum Value {
    Host(f64),
    Device(Box<Tensor<1>>),
}

impl Factor {
    /// A number that the host knows. It is rounded to `f32`, except for gradients in `f64`.
    pub fn host(value: f64) -> Self {
        Self::new(Value::Host(value))
    }

    /// A number that is a tensor of one element on a device.
    pub fn device(value: Tensor<1>) -> Self {
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
            Value::Host(value) => Tensor::from_data([*value as f32], (&device, DType::F32)),
            Value::Device(value) if value.device() == device => *value.clone(),
            Value::Device(value) => value.clone().to_device(&device),
        };
        self.by_device.push((device, there.clone()));
        there
    }

    /// `gradient` times the factor, in the dtype of the gradient. One of 16 bits is multiplied in `f32`.
    pub fn times<const D: usize>(&mut self, gradient: Tensor<D>) -> Tensor<D> {
        let dtype = gradient.dtype();
        if let (DType::F64, Value::Host(value)) = (dtype, &self.value) {
            return gradient.mul_scalar(*value);
        }
        let gradient = widen(gradient);
        let factor = self.on(gradient.device()).cast(gradient.dtype());
        (gradient * factor.reshape([1; D])).cast(dtype)
    }
}

struct Scale {
    gradients: GradientsParams,
    factor: Factor,
    /// The parameters visited so far. One that occurs in several places of the module is visited in each of them.
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.seen.insert(param.id)
            && let Some(gradient) = self.gradients.remove::<D>(param.id)
        {
            let gradient = self.factor.times(gradient);
            self.gradients.register::<D>(param.id, gradient);
        }
    }
}
