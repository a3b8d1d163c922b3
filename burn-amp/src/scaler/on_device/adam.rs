//! [`DeviceAdam`].

use super::{SkipsNan, skip::Skip};
use burn::{
    config::Config,
    optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource},
    tensor::{DType, Device, Tensor},
};

/// The configuration of [`DeviceAdam`], with the names and defaults of Burn's `AdamConfig`; [`adamw`](Self::adamw) has the
/// defaults of `AdamWConfig`. There is no AMSGrad and no cautious weight decay. Gradients are
/// [clipped](super::DeviceOptimizer::with_grad_clipping) by the [`DeviceOptimizer`](super::DeviceOptimizer) that the optimizer
/// is put into.
#[derive(Config, Debug)]
pub struct DeviceAdamConfig {
    /// The share of the mean gradient that is kept at each step.
    #[config(default = 0.9)]
    pub beta_1: f32,
    /// The share of the mean squared gradient that is kept at each step.
    #[config(default = 0.999)]
    pub beta_2: f32,
    /// Added to the denominator.
    #[config(default = 1e-5)]
    pub epsilon: f32,
    /// L2 penalty; 0 for none.
    #[config(default = 0.0)]
    pub weight_decay: f32,
    /// Whether the penalty shrinks the parameters themselves (AdamW, Loshchilov and Hutter 2019)
    /// instead of being added to the gradient (Adam).
    #[config(default = false)]
    pub decoupled_weight_decay: bool,
}

impl DeviceAdamConfig {
    /// AdamW with the defaults of Burn's `AdamWConfig`: a decoupled weight decay of 1e-4.
    ///
    /// ```
    /// use burn_amp::{DeviceAdamConfig, DeviceOptimizer};
    ///
    /// let optim = DeviceOptimizer::from(DeviceAdamConfig::adamw().with_weight_decay(0.01).build());
    /// # let _ = optim;
    /// ```
    pub fn adamw() -> Self {
        Self::new()
            .with_weight_decay(1e-4)
            .with_decoupled_weight_decay(true)
    }

    /// The optimizer.
    pub fn build(&self) -> DeviceAdam {
        DeviceAdam {
            config: self.clone(),
        }
    }
}

/// Adam (Kingma and Ba 2015) or AdamW that the device can tell to skip a step.
///
/// Burn's `Adam` counts its steps on the host for the bias correction. Here the correction is a
/// moment like the others, of a gradient that is always 1: `c = beta c + (1 - beta)` is
/// `1 - beta^t` after `t` steps that were taken. The two differ only in rounding, where `1 - beta^t` in
/// f32 is the coarser.
#[derive(Clone)]
pub struct DeviceAdam {
    config: DeviceAdamConfig,
}

/// The state of [`DeviceAdam`] for one parameter: running means, which are zero before the first step that is taken.
#[derive(Clone, Debug)]
pub struct DeviceAdamState<const D: usize> {
    /// The mean of the gradient.
    moment_1: Tensor<D>,
    /// The mean of the squared gradient.
    moment_2: Tensor<D>,
    /// The mean of 1 with the beta of the first moment; one element, not in 16 bits, where 0.999 of it would round to all of it.
    weight_1: Tensor<1>,
    /// The mean of 1 with the beta of the second moment; one element, as wide.
    weight_2: Tensor<1>,
}

impl Optimizer for DeviceAdam {
    type State<const D: usize> = DeviceAdamState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let config = &self.config;
        let skip = Skip::of(&grad);
        let old = state.unwrap_or_else(|| DeviceAdamState::new(&tensor));
        let (grad, shrunk) = if config.weight_decay == 0.0 {
            (grad, tensor.clone())
        } else if config.decoupled_weight_decay {
            let kept = 1.0 - lr * f64::from(config.weight_decay);
            (grad, tensor.clone().mul_scalar(kept))
        } else {
            let penalty = tensor.clone().mul_scalar(config.weight_decay);
            (grad + penalty, tensor.clone())
        };
        let new = old.next(grad, config);
        let moved = shrunk - new.direction(config.epsilon).mul_scalar(lr);
        (skip.keep(moved, tensor), Some(new.unless(&skip, old)))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        DeviceAdamState {
            moment_1: state.moment_1.to_device(device),
            moment_2: state.moment_2.to_device(device),
            weight_1: state.weight_1.to_device(device),
            weight_2: state.weight_2.to_device(device),
        }
    }
}

impl SkipsNan for DeviceAdam {}

impl<const D: usize> DeviceAdamState<D> {
    fn new(tensor: &Tensor<D>) -> Self {
        let wide = match tensor.dtype() {
            wide @ DType::F64 => wide,
            _ => DType::F32,
        };
        let weight = Tensor::zeros([1], (&tensor.device(), wide));
        Self {
            moment_1: tensor.zeros_like(),
            moment_2: tensor.zeros_like(),
            weight_1: weight.clone(),
            weight_2: weight,
        }
    }

    fn next(&self, grad: Tensor<D>, config: &DeviceAdamConfig) -> Self {
        let one = self.weight_1.ones_like();
        Self {
            moment_1: mean(&self.moment_1, grad.clone(), config.beta_1),
            moment_2: mean(&self.moment_2, grad.square(), config.beta_2),
            weight_1: mean(&self.weight_1, one.clone(), config.beta_1),
            weight_2: mean(&self.weight_2, one, config.beta_2),
        }
    }

    /// The corrected mean gradient, divided by the root of the corrected mean squared gradient plus `epsilon`.
    fn direction(&self, epsilon: f32) -> Tensor<D> {
        let root = self.weight_2.clone().sqrt();
        let factor = root.clone() / self.weight_1.clone();
        let epsilon = root.mul_scalar(epsilon);
        let [factor, epsilon] =
            [factor, epsilon].map(|number| number.cast(self.moment_1.dtype()).reshape([1; D]));
        self.moment_1.clone() * factor / (self.moment_2.clone().sqrt() + epsilon)
    }

    fn unless(self, skip: &Skip, old: Self) -> Self {
        Self {
            moment_1: skip.keep(self.moment_1, old.moment_1),
            moment_2: skip.keep(self.moment_2, old.moment_2),
            weight_1: skip.keep(self.weight_1, old.weight_1),
            weight_2: skip.keep(self.weight_2, old.weight_2),
        }
    }
}

/// The running mean `mean`, moved towards `value`.
fn mean<const D: usize>(mean: &Tensor<D>, value: Tensor<D>, beta: f32) -> Tensor<D> {
    mean.clone().mul_scalar(beta) + value.mul_scalar(1.0 - beta)
}

impl<const D: usize> RecordState for DeviceAdamState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "moment_1", self.moment_1.clone().into_data());
        out.push_tensor(prefix, "moment_2", self.moment_2.clone().into_data());
        out.push_tensor(prefix, "weight_1", self.weight_1.clone().into_data());
        out.push_tensor(prefix, "weight_2", self.weight_2.clone().into_data());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        Some(Self {
            moment_1: Tensor::from_data(src.take_tensor(prefix, "moment_1")?, device),
            moment_2: Tensor::from_data(src.take_tensor(prefix, "moment_2")?, device),
            weight_1: Tensor::from_data(src.take_tensor(prefix, "weight_1")?, device),
            weight_2: Tensor::from_data(src.take_tensor(prefix, "weight_2")?, device),
        })
    }
}
