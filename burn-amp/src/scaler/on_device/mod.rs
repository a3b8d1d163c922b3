//! Loss scaling for which the host never waits: the device decides whether a step is taken.

mod adam;
mod loss_scaler;
mod optimizer;
mod sgd;
mod skip;
mod unscaled;

pub use adam::{DeviceAdam, DeviceAdamConfig, DeviceAdamState};
pub use loss_scaler::DeviceLossScaler;
pub use optimizer::{DeviceOptimizer, SkipsNan};
pub use sgd::{DeviceSgd, DeviceSgdConfig, DeviceSgdState};
pub use unscaled::DeviceUnscaled;
