//! Autocast: each op runs in the dtype that suits it.

mod device;
#[cfg(feature = "fp8")]
mod fp8;
#[cfg(not(feature = "fp8"))]
#[path = "no_fp8.rs"]
mod fp8;
mod layer;
mod nan_guard;
mod policy;
mod reduction;
mod region;
mod report;
mod rule;
mod rules;

pub use device::{Autocast, AutocastDevice, AutocastLease};
#[cfg(feature = "fp8")]
pub use fp8::{Fp8Filter, Fp8State, with_fp8_ops};
pub use layer::AutocastLayer;
pub use nan_guard::{NanGuard, NonFinite, named};
pub use policy::{Policy, PolicyBuilder, PolicyError};
pub use region::{autocast, full_precision};
pub use report::{AutocastReport, OpCount};
pub use rule::Rule;
