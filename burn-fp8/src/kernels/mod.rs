//! The CubeCL kernels.
//!
//! They are portable: codes are bound as 32-bit words, four to a word, and are encoded and decoded in registers by bit
//! operations, so a runtime needs neither 8-bit types nor fp8 instructions. If a GPU has fp8 instructions, and its runtime takes
//! inline PTX, the kernels use them: `cvt` in `codec`, `mma` and `wgmma` in `matmul::tile`.
//!
//! **Casts** read four elements at a time. A transposed or permuted input is read in place, and its codes have the same layout (not
//! on WebGPU). An input with gaps between its rows, such as a slice of columns or what CUDA allocates, is read in place too; its codes
//! have no gaps. With scales per row, column or block, one kernel on a GPU finds scales and applies them in one read, for blocks of up
//! to 1,024 rows of 32 columns, or as many elements in rows (1x128, 128x128, rows of 32,768). Where blocks are larger, or their codes do
//! not fill whole words or tiles, it reads twice, and copies rows with gaps first.
//!
//! By its machine code, a cast of bf16 takes about 10 instructions an element on Hopper (13 with the transposed copy) where the GPU
//! makes the codes, which takes the feature `cuda-cpp` and compute capability 8.9 or newer. Bit operations take 22 (26), counted for
//! Ampere. To keep up with an H200's memory, a cast has room for about 30, of which 15 on integers, as bit operations are.
//!
//! **Products** on tensor cores and by cuBLASLt read both operands along the inner dimension, in rows that begin at multiples of 16
//! bytes. Any other operand is copied first, which costs a read and a write of it. With one scale a tensor, a layer casts input,
//! weight and gradient both ways in one read, so its products copy nothing. (On other devices the second way is a view.) Codes with
//! scales per column or block are stored by columns, in the direction of their sums. So if sizes are multiples of 16, a layer copies
//! only the square blocks of a weight, for the gradient of the input.

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
