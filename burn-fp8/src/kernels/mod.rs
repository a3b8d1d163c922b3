//! The CubeCL kernels.
//!
//! Portable: codes are bound as 32-bit words, four to a word, and are coded and decoded in registers by bit
//! operations, so that a runtime needs neither 8-bit types nor fp8 instructions.

mod amax;
mod buffer;
mod codec;
mod dequantize;
mod matmul;
mod quantize;
mod quantize_transposed;
mod scale;
mod update_scale;

pub(crate) use amax::amax;
pub(crate) use dequantize::dequantize;
pub use matmul::{
    MatmulPolicy, MatmulRoutine, UnknownRoutine, matmul_by, matmul_definition, matmul_policy,
    set_matmul_policy,
};
pub(crate) use matmul::{matmul, matmul_amax};
pub(crate) use quantize::quantize;
pub(crate) use quantize_transposed::quantize_transposed;
pub(crate) use scale::scales;
pub(crate) use update_scale::update_scale;
