//! The implementations of `Fp8Ops`, one file per backend.

mod autodiff;
#[cfg(feature = "cubecl")]
mod cubecl;
#[cfg(feature = "flex")]
mod flex;
#[cfg(any(feature = "cubecl", feature = "remote"))]
mod fusion;
#[cfg(feature = "remote")]
pub(crate) mod router;
