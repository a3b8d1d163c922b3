//! An optimizer of a user's own that skips NaN.

use super::loss_scaler_support::{gradients, loss, problem, values};
use burn::{
    optim::{
        GradientsParams, LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink,
        StateSource,
    },
    tensor::{Device, Tensor},
};
use burn_amp::{DeviceOptimizer, LossScalerConfig, SkipsNan};

/// Goes by the sign of the mean gradient (Bernstein et al. 2018, with momentum), and less far with each step.
#[derive(Clone)]
struct Signs;

#[derive(Clone, Debug)]
struct SignsState<const D: usize> {
    mean: Tensor<D>,
    /// Steps taken, for each element.
    steps: Tensor<D>,
}

impl<const D: usize> RecordState for SignsState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "mean", self.mean.clone().into_data());
        out.push_tensor(prefix, "steps", self.steps.clone().into_data());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        Some(Self {
            mean: Tensor::from_data(src.take_tensor(prefix, "mean")?, device),
            steps: Tensor::from_data(src.take_tensor(prefix, "steps")?, device),
        })
    }
}

impl Optimizer for Signs {
    type State<const D: usize> = SignsState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<SignsState<D>>,
    ) -> (Tensor<D>, Option<SignsState<D>>) {
        let old = state.unwrap_or_else(|| SignsState {
            mean: tensor.zeros_like(),
            steps: tensor.zeros_like(),
        });
        // A gradient to be skipped is NaN throughout.
        let skip = grad.clone().is_nan();
        let keep = |new: Tensor<D>, old: Tensor<D>| new.mask_where(skip.clone(), old);
        let mean = old.mean.clone().mul_scalar(0.5) + grad.mul_scalar(0.5);
        let steps = old.steps.clone().add_scalar(1.0);
        let moved = tensor.clone() - mean.clone().sign().mul_scalar(lr) / steps.clone();
        let state = SignsState {
            mean: keep(mean, old.mean),
            steps: keep(steps, old.steps),
        };
        (keep(moved, tensor), Some(state))
    }

    fn to_device<const D: usize>(state: SignsState<D>, device: &Device) -> SignsState<D> {
        SignsState {
            mean: state.mean.to_device(device),
            steps: state.steps.to_device(device),
        }
    }
}

impl SkipsNan for Signs {}

/// What it comes to with overflows is what it comes to without the steps that overflowed, and without a scaler.
#[test]
fn it_skips_and_goes_on_as_if_nothing_had_been() {
    let device = Device::flex().autodiff();
    let (mut model, x) = problem(&device);
    let (mut control, _) = problem(&device);
    let mut optim = DeviceOptimizer::from(Signs);
    let mut plain = ModuleOptimizer::from(Signs);
    let mut scaler = LossScalerConfig::new().init_on(&device).unwrap();
    for overflow in [true, false, false, true, true, false] {
        let before = values(&model);
        let grads = gradients(scaler.scale(loss(&model, &x, overflow)), &model);
        model = scaler.step(&mut optim, 0.1, model, grads);
        if overflow {
            assert_eq!(values(&model), before);
        } else {
            let grads = gradients(loss(&control, &x, false), &control);
            control = plain.step(0.1, control, grads);
            assert_ne!(values(&model), before);
        }
        assert_eq!(values(&model), values(&control));
    }
    assert_eq!(scaler.state().skipped, 3);
    // Another overflow, which no optimizer sees, leaves the gradients as they are.
    let unscaled = scaler.unscale(GradientsParams::new(), &model);
    assert_eq!(
        values(&unscaled.step(&mut optim, 0.1, model)),
        values(&control)
    );
}
