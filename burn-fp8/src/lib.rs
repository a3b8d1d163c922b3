#![doc = include_str!("../README.md")]

mod backends;
mod cast;
#[cfg(any(feature = "cubecl", feature = "remote"))]
mod custom;
mod error;
#[cfg(feature = "flex")]
mod flex;
mod format;
mod functions;
mod granular;
#[cfg(feature = "cubecl")]
pub mod kernels;
mod linear;
mod operand;
// Without a backend, the arguments are unused.
#[cfg_attr(
    not(any(feature = "flex", feature = "cubecl", feature = "remote")),
    allow(unused_variables)
)]
mod ops;
mod portable;
mod provider;
pub mod recipe;
mod scope;
mod tensor;

#[cfg(feature = "remote")]
pub use backends::router::{custom_ops, register_fp8_ops, register_portable_fp8_ops};
pub use cast::Fp8Cast;
pub use error::Fp8Error;
pub use format::Fp8Format;
pub use functions::{amax, scaled_matmul, scaled_matmul_with_amax};
pub use linear::{Fp8Linear, Fp8LinearConfig, GradAmaxSlot, ScalingState, share_amaxes};
pub use operand::Operand;
pub use ops::{Bias, BlockLinearSpec, Fp8Ops, LinearSpec, MatmulSpec};
pub use scope::{Fp8Scope, Microbatch, calibrate, fp8_autocast};
pub use tensor::{Fp8Data, Fp8Tensor, Granularity};
