#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod autocast;
mod scaler;

#[cfg(feature = "fp8")]
pub use autocast::Fp8Filter;
pub use autocast::{
    Autocast, AutocastDevice, AutocastLayer, AutocastLease, AutocastReport, NanGuard, NonFinite,
    OpCount, Policy, PolicyBuilder, PolicyError, Rule, autocast, full_precision, named,
};
#[cfg(feature = "fp8")]
pub use burn_fp8::{Fp8Error, recipe};
pub use burn_layer::{CustomOpHandler, LayerError, Layers, Op};
pub use scaler::{
    DeviceAdam, DeviceAdamConfig, DeviceAdamState, DeviceLossScaler, DeviceOptimizer, DeviceSgd,
    DeviceSgdConfig, DeviceSgdState, DeviceUnscaled, LossScaler, LossScalerConfig, LossScalerError,
    LossScalerState, Overflow, ScaleChange, ScaleHistory, ScaledStep, SharedLossScaler, SkipsNan,
    Unscaled,
};
