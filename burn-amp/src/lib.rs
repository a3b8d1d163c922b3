#![doc = include_str!("../README.md")]
//!
//! # With burn-train
//!
//! A program that trains with burn-train's `Learner` only has to change the device: data loaders, metrics,
//! checkpoints and records see `f32`. (fp16 needs a [`SharedLossScaler`] in the model, and
//! [`saved_with`](SharedLossScaler::saved_with) to have it in the checkpoints.)
//!
//! ```
//! use burn::{lr_scheduler::constant::ConstantLr, optim::AdamConfig, tensor::Device};
//! use burn_amp::Autocast;
//! use burn_train::{Learner, SupervisedTraining, metric::LossMetric};
//! # use burn::{
//! #     data::{dataloader::{DataLoaderBuilder, batcher::Batcher}, dataset::InMemDataset},
//! #     module::Module,
//! #     nn::{Linear, LinearConfig},
//! #     tensor::{Tensor, TensorData},
//! # };
//! # use burn_train::{InferenceStep, RegressionOutput, TrainOutput, TrainStep};
//! # #[derive(Module, Debug)]
//! # struct Net {
//! #     linear: Linear,
//! # }
//! # impl Net {
//! #     fn new(device: &Device) -> Self {
//! #         Self { linear: LinearConfig::new(1, 1).init(device) }
//! #     }
//! # }
//! # impl InferenceStep for Net {
//! #     type Input = Tensor<2>;
//! #     type Output = RegressionOutput;
//! #     fn step(&self, batch: Tensor<2>) -> RegressionOutput {
//! #         let output = self.linear.forward(batch.clone());
//! #         let loss = (output.clone() - batch.clone()).powi_scalar(2).mean();
//! #         RegressionOutput::new(loss, output, batch)
//! #     }
//! # }
//! # impl TrainStep for Net {
//! #     type Input = Tensor<2>;
//! #     type Output = RegressionOutput;
//! #     fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
//! #         let output = InferenceStep::step(self, batch);
//! #         TrainOutput::new(self, output.loss.backward(), output)
//! #     }
//! # }
//! # struct Rows;
//! # impl Batcher<f32, Tensor<2>> for Rows {
//! #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
//! #         let len = items.len();
//! #         Tensor::from_data(TensorData::new(items, [len, 1]), device)
//! #     }
//! # }
//! # let loader = || {
//! #     DataLoaderBuilder::new(Rows).batch_size(2).build(InMemDataset::new(vec![0.1, 0.2, 0.3]))
//! # };
//! # let (train, valid) = (loader(), loader());
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//!
//! let device = Autocast::bf16().device(Device::flex())?.autodiff();
//! let training = SupervisedTraining::new(folder, train, valid).metrics((LossMetric::new(),));
//! # let training = training.with_application_logger(None);
//! let learner = Learner::new(Net::new(&device), AdamConfig::new().init(), ConstantLr::new(1e-3));
//! let result = training.launch(learner);
//! assert!(result.error.is_none());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(missing_docs)]

mod autocast;
mod scaler;

pub use autocast::{
    Autocast, AutocastDevice, AutocastLayer, AutocastLease, AutocastReport, NanGuard, NonFinite,
    OpCount, Policy, PolicyBuilder, PolicyError, Rule, autocast, full_precision, named,
};
#[cfg(feature = "fp8")]
pub use autocast::{Fp8Filter, Fp8State, with_fp8_ops};
#[cfg(feature = "fp8")]
pub use burn_fp8::{Fp8Error, recipe};
pub use burn_layer::{CustomOpHandler, LayerError, Layers, Op, clip_gradient_norm};
pub use scaler::{
    DeviceAdam, DeviceAdamConfig, DeviceAdamState, DeviceLossScaler, DeviceOptimizer, DeviceSgd,
    DeviceSgdConfig, DeviceSgdState, DeviceUnscaled, LossScaler, LossScalerConfig, LossScalerError,
    LossScalerState, Overflow, ScaleChange, ScaleHistory, ScaledStep, SharedLossScaler, SkipsNan,
    Unscaled,
};
