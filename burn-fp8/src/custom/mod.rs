//! The ops as custom operations, for lazy backends (fusion) and remote ones: how they are described, and how the backend that
//! finally gets them runs them.

mod blocks;
mod describe;
mod execute;
mod kernels;
mod lazy;
mod scalar;

pub(crate) use blocks::{dequantize_blocks, lazy_block_ops, matmul_blocks, quantize_blocks};
#[cfg(feature = "cubecl")]
pub(crate) use describe::matmul_shape;
pub(crate) use describe::{
    amax, dequantize, matmul, quantize, quantize_transposed, scales, update_scale,
};
pub(crate) use execute::execute;
#[cfg(feature = "remote")]
pub(crate) use execute::execute_with;
#[cfg(feature = "remote")]
pub(crate) use kernels::{Kernels, Native, Portable};
pub(crate) use lazy::lazy_ops;

const AMAX: &str = "fp8::amax";
const SCALES: &str = "fp8::scales";
const QUANTIZE: &str = "fp8::quantize";
const QUANTIZE_TRANSPOSED: &str = "fp8::quantize_transposed";
const DEQUANTIZE: &str = "fp8::dequantize";
const MATMUL: &str = "fp8::matmul";
const MATMUL_AMAX: &str = "fp8::matmul_amax";
const UPDATE_SCALE: &str = "fp8::update_scale";

/// The names of the ops that remote devices send.
#[cfg(feature = "remote")]
pub(crate) const ALL: [&str; 8] = [
    AMAX,
    SCALES,
    QUANTIZE,
    QUANTIZE_TRANSPOSED,
    DEQUANTIZE,
    MATMUL,
    MATMUL_AMAX,
    UPDATE_SCALE,
];
