//! Loss scaling.

mod clip;
mod config;
mod error;
mod gradients;
mod history;
mod loss_scaler;
mod on_device;
mod overflow;
mod saved_schedule;
mod shared;
mod state;
mod together;
mod unchecked;
mod unscaled;

pub use config::LossScalerConfig;
pub use error::LossScalerError;
pub use history::{ScaleChange, ScaleHistory};
pub use loss_scaler::LossScaler;
pub use on_device::{
    DeviceAdam, DeviceAdamConfig, DeviceAdamState, DeviceLossScaler, DeviceOptimizer, DeviceSgd,
    DeviceSgdConfig, DeviceSgdState, DeviceUnscaled, SkipsNan,
};
pub use overflow::Overflow;
pub use shared::SharedLossScaler;
pub use state::LossScalerState;
pub use unscaled::{ScaledStep, Unscaled};
