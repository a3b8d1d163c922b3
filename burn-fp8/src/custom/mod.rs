//! The ops as custom operations, for lazy backends (fusion) and remote ones: how they are described, and how the backend that
//! finally gets them runs them.

mod describe;
mod execute;
mod lazy;
mod scalar;

pub(crate) use describe::{
    Description, amax, dequantize, matmul, quantize, quantize_blocks, quantize_transposed, scales,
    update_scale,
};
pub(crate) use execute::execute;
pub(crate) use lazy::lazy_ops;

const AMAX: &str = "fp8::amax";
const SCALES: &str = "fp8::scales";
const QUANTIZE: &str = "fp8::quantize";
const QUANTIZE_TRANSPOSED: &str = "fp8::quantize_transposed";
const DEQUANTIZE: &str = "fp8::dequantize";
const MATMUL: &str = "fp8::matmul";
const MATMUL_AMAX: &str = "fp8::matmul_amax";
const UPDATE_SCALE: &str = "fp8::update_scale";
const QUANTIZE_BLOCKS: &str = "fp8::quantize_blocks";

/// The names of the ops that remote devices send.
#[cfg(feature = "remote")]
pub(crate) const ALL: [&str; 9] = [
    AMAX,
    SCALES,
    QUANTIZE,
    QUANTIZE_TRANSPOSED,
    DEQUANTIZE,
    MATMUL,
    MATMUL_AMAX,
    UPDATE_SCALE,
    QUANTIZE_BLOCKS,
];
