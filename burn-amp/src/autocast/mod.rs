//! Autocast: each op runs in the dtype that suits it.

mod device;
mod nan_guard;
mod policy;
mod region;
mod report;
mod rule;
mod rules;

pub use device::{Autocast, AutocastDevice, AutocastLayer, AutocastLease};
pub use nan_guard::{NanGuard, NonFinite, named};
pub use policy::{Policy, PolicyBuilder, PolicyError};
pub use region::{autocast, full_precision};
pub use report::{AutocastReport, OpCount};
pub use rule::Rule;
