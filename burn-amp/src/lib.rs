#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod autocast;
mod scaler;

pub use autocast::{
    Autocast, AutocastDevice, AutocastLayer, AutocastReport, OpCount, Policy, PolicyBuilder,
    PolicyError, Rule,
};
pub use burn_layer::{LayerError, Op};
pub use scaler::{
    DeviceAdam, DeviceAdamConfig, DeviceAdamState, DeviceLossScaler, DeviceOptimizer, DeviceSgd,
    DeviceSgdConfig, DeviceSgdState, DeviceUnscaled, LossScaler, LossScalerConfig, LossScalerError,
    LossScalerState, Overflow, ScaleChange, ScaleHistory, ScaledStep, SharedLossScaler, SkipsNan,
    Unscaled,
};
