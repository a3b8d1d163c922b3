//! Loss scaling.

mod config;
mod gradients;
mod loss_scaler;

pub use config::LossScalerConfig;
pub use gradients::{Overflow, Unscaled};
pub use loss_scaler::{LossScaler, LossScalerState, ScaledStep};

/// Why a loss scaler cannot be made as configured.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LossScalerError {
    /// A value that makes no sense.
    #[error("the loss scaler's {what} is {found}; expected {expected}")]
    Invalid {
        /// The name of the value.
        what: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What it is.
        found: f64,
    },
}
