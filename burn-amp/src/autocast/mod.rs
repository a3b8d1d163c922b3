//! Autocast: each op runs in the dtype that suits it.

mod device;
mod policy;
mod report;
mod rule;
mod rules;

pub use device::{Autocast, AutocastDevice, AutocastLayer};
pub use policy::{Policy, PolicyBuilder, PolicyError};
pub use report::{AutocastReport, OpCount};
pub use rule::Rule;
