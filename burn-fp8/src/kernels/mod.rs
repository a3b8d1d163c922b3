//! The CubeCL kernels.
//!
//! They are portable: codes are bound as 32-bit words, four to a word, and are encoded and decoded in registers by bit
//! operations, so a runtime needs neither 8-bit types nor fp8 instructions. If a GPU has fp8 instructions, and its runtime takes
//! inline PTX, the kernels use them: `cvt` in `codec`, `mma` and `wgmma` in `matmul::tile`.

mod amax;
mod batch;
mod blocks;
mod buffer;
mod codec;
mod dequantize;
mod dequantize_blocks;
mod input;
mod matmul;
mod ptx;
mod quantize;
mod quantize_blocks;
mod quantize_transposed;
mod rows;
mod scale;
mod scale_grid;
mod tiles;
mod update_scale;

pub(crate) use amax::amax;
pub(crate) use buffer::swapped;
pub(crate) use dequantize::dequantize;
pub(crate) use dequantize_blocks::dequantize_blocks;
pub(crate) use input::check_cast;
pub use matmul::{
    MatmulPolicy, MatmulRoutine, UnknownRoutine, matmul_amax_by, matmul_by, matmul_policy,
    set_matmul_policy,
};
pub(crate) use matmul::{check_product, codes_lie_along_sums};
pub(crate) use quantize::quantize;
pub(crate) use quantize_blocks::quantize_blocks;
pub(crate) use quantize_transposed::quantize_transposed;
pub(crate) use scale::scales;
pub(crate) use update_scale::update_scale;
