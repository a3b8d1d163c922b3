//! [`DeviceSgd`].

use super::{SkipsNan, skip::Skip};
use burn::{
    config::Config,
    optim::{
        LearningRate, Optimizer, RecordState, StateSink, StateSource,
        decay::{WeightDecay, WeightDecayConfig},
        momentum::MomentumConfig,
    },
    tensor::{Device, Tensor},
};

/// The configuration of [`DeviceSgd`], like Burn's `SgdConfig`.
#[derive(Config, Debug)]
pub struct DeviceSgdConfig {
    /// L2 penalty.
    pub weight_decay: Option<WeightDecayConfig>,
    /// Momentum.
    pub momentum: Option<MomentumConfig>,
}

impl DeviceSgdConfig {
    /// The optimizer.
    pub fn build(&self) -> DeviceSgd {
        DeviceSgd {
            weight_decay: self.weight_decay.as_ref().map(WeightDecay::new),
            momentum: self.momentum.clone(),
        }
    }
}

/// Stochastic gradient descent that the device can tell to skip a step. It computes what Burn's
/// `Sgd` computes, bit for bit.
#[derive(Clone)]
pub struct DeviceSgd {
    weight_decay: Option<WeightDecay>,
    momentum: Option<MomentumConfig>,
}

/// The state of [`DeviceSgd`] with momentum for one parameter.
#[derive(Clone, Debug)]
pub struct DeviceSgdState<const D: usize> {
    /// The velocity. Zero before the first step that is taken.
    velocity: Tensor<D>,
    /// One element: 0 before the first step that is taken, then 1. The first gradient is not dampened.
    started: Tensor<1>,
}

impl Optimizer for DeviceSgd {
    type State<const D: usize> = DeviceSgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let skip = Skip::of(&grad);
        let mut grad = match &self.weight_decay {
            Some(decay) => decay.transform(grad, tensor.clone()),
            None => grad,
        };
        let mut state = state;
        if let Some(momentum) = &self.momentum {
            let old = state.unwrap_or_else(|| DeviceSgdState::new(&tensor));
            let new = old.next(grad.clone(), momentum);
            grad = if momentum.nesterov {
                new.velocity.clone().mul_scalar(momentum.momentum) + grad
            } else {
                new.velocity.clone()
            };
            state = Some(DeviceSgdState {
                velocity: skip.keep(new.velocity, old.velocity),
                started: skip.keep(new.started, old.started),
            });
        }
        let moved = tensor.clone() - grad.mul_scalar(lr);
        (skip.keep(moved, tensor), state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        DeviceSgdState {
            velocity: state.velocity.to_device(device),
            started: state.started.to_device(device),
        }
    }
}

impl SkipsNan for DeviceSgd {}

impl<const D: usize> DeviceSgdState<D> {
    fn new(tensor: &Tensor<D>) -> Self {
        Self {
            velocity: tensor.zeros_like(),
            started: Tensor::zeros([1], (&tensor.device(), tensor.dtype())),
        }
    }

    fn next(&self, grad: Tensor<D>, momentum: &MomentumConfig) -> Self {
        let dampened = self.started.clone().equal_scalar(1.0);
        let weight = self.started.ones_like();
        let weight = weight.mask_fill(dampened, 1.0 - momentum.dampening);
        let kept = self.velocity.clone().mul_scalar(momentum.momentum);
        Self {
            velocity: grad * weight.reshape([1; D]) + kept,
            started: self.started.ones_like(),
        }
    }
}

impl<const D: usize> RecordState for DeviceSgdState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "velocity", self.velocity.clone().into_data());
        out.push_tensor(prefix, "started", self.started.clone().into_data());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        Some(Self {
            velocity: Tensor::from_data(src.take_tensor(prefix, "velocity")?, device),
            started: Tensor::from_data(src.take_tensor(prefix, "started")?, device),
        })
    }
}
