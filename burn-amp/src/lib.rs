#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod autocast;
mod scaler;

pub use autocast::{
    Autocast, AutocastDevice, AutocastLayer, AutocastLease, AutocastReport, NanGuard, NonFinite,
    OpCount, Policy, PolicyBuilder, PolicyError, Rule, autocast, full_precision, named,
};
pub use burn_layer::{CustomOpHandler, LayerError, Layers, Op};
pub use scaler::{
    DeviceAdam, DeviceAdamConfig, DeviceAdamState, DeviceLossScaler, DeviceOptimizer, DeviceSgd,
    DeviceSgdConfig, DeviceSgdState, DeviceUnscaled, LossScaler, LossScalerConfig, LossScalerError,
    LossScalerState, Overflow, ScaleChange, ScaleHistory, ScaledStep, SharedLossScaler, SkipsNan,
    Unscaled,
};
