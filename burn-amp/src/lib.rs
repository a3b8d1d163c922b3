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
    LossScaler, LossScalerConfig, LossScalerError, LossScalerState, Overflow, ScaledStep, Unscaled,
};
