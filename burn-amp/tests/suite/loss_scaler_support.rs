//! What the tests of loss scaling share.

use burn::{
    nn::{Linear, LinearConfig},
    optim::GradientsParams,
    tensor::{DType, Device, Tensor},
};
use burn_amp::LossScalerConfig;
use burn_layer::{Layer, Layers, Op};
use serde::Deserialize;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// A run of PyTorch's `GradScaler`.
#[derive(Deserialize)]
pub(super) struct Trace {
    config: TraceConfig,
    pub(super) overflow: Vec<bool>,
    /// After each update.
    pub(super) scale_and_tracker: Vec<(f32, u32)>,
}

#[derive(Deserialize)]
struct TraceConfig {
    init_scale: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u32,
}

impl Trace {
    pub(super) fn config(&self) -> LossScalerConfig {
        LossScalerConfig::new()
            .with_init_scale(self.config.init_scale)
            .with_growth_factor(self.config.growth_factor)
            .with_backoff_factor(self.config.backoff_factor)
            .with_growth_interval(self.config.growth_interval)
    }
}

pub(super) fn traces() -> Vec<Trace> {
    let traces = include_str!("../fixtures/grad_scaler_traces.json");
    let traces: Vec<Trace> = serde_json::from_str(traces).unwrap();
    assert_eq!(traces.len(), 40);
    traces
}

/// A linear layer that is the same every time, and its input.
pub(super) fn problem(device: &Device) -> (Linear, Tensor<2>) {
    let mut model = LinearConfig::new(3, 2).init(device);
    model.weight = model.weight.map(|_| {
        Tensor::<2>::from_floats([[0.5, -0.25], [0.125, 0.75], [-0.5, 0.3]], device).require_grad()
    });
    model.bias = model
        .bias
        .map(|bias| bias.map(|_| Tensor::<1>::from_floats([0.1, -0.2], device).require_grad()));
    (model, input(device))
}

/// The input of [`problem`].
pub(super) fn input(device: &Device) -> Tensor<2> {
    Tensor::from_floats([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]], device)
}

/// A loss with a gradient for every parameter; not finite where it is to overflow.
pub(super) fn loss(model: &Linear, x: &Tensor<2>, overflow: bool) -> Tensor<1> {
    let factor = if overflow { f32::INFINITY } else { 1.0 };
    model
        .forward(x.clone())
        .powi_scalar(2)
        .mean()
        .mul_scalar(factor)
}

pub(super) fn gradients(loss: Tensor<1>, model: &Linear) -> GradientsParams {
    GradientsParams::from_grads(loss.backward(), model)
}

/// Weight and bias.
pub(super) fn values(model: &Linear) -> Vec<f32> {
    let mut values: Vec<f32> = model.weight.val().into_data().try_to_vec().unwrap();
    let bias = model.bias.as_ref().unwrap().val();
    values.extend(bias.into_data().try_to_vec::<f32>().unwrap());
    values
}

/// Counts how often the host waited for floats.
#[derive(Clone, Debug, Default)]
pub(super) struct Readbacks(Arc<AtomicUsize>);

impl Layer for Readbacks {
    fn ran(&self, op: Op, _dtype: DType) {
        if op == Op::float_into_data {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Readbacks {
    pub(super) fn device() -> (Self, Device) {
        let counter = Self::default();
        let device = Layers::on(Device::flex()).layer(counter.clone());
        (counter, device.serve().unwrap().autodiff())
    }

    /// How many since the last call.
    pub(super) fn take(&self) -> usize {
        self.0.swap(0, Ordering::Relaxed)
    }
}
