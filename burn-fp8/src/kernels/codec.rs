//! Codes in registers.

use cubecl::{
    ir::types::Fp8Format as CubeFormat,
    post_processing::minifloat::{f32_to_fp8_bits, fp8_bits_to_f32},
    prelude::*,
};

use crate::Fp8Format;

/// CubeCL's name of a format.
pub(in crate::kernels) fn cube_format(format: Fp8Format) -> CubeFormat {
    match format {
        Fp8Format::E4M3 => CubeFormat::E4M3,
        Fp8Format::E5M2 => CubeFormat::E5M2,
    }
}

/// The code of a value, in the low byte.
#[cube]
pub(in crate::kernels) fn encode(value: f32, #[comptime] format: CubeFormat) -> u32 {
    f32_to_fp8_bits::<Const<1>>(Vector::new(value), format).extract(0usize)
}

/// The value of the code in the low byte.
#[cube]
pub(in crate::kernels) fn decode(code: u32, #[comptime] format: CubeFormat) -> f32 {
    fp8_bits_to_f32::<Const<1>>(Vector::new(code & 0xFFu32), format).extract(0usize)
}

/// The value of code number `index` of an array of words.
#[cube]
pub(in crate::kernels) fn load(words: &[u32], index: usize, #[comptime] format: CubeFormat) -> f32 {
    decode(words[index / 4] >> (8 * (index % 4) as u32), format)
}

/// The bits of a value without its sign: ordered as the magnitudes are, NaN above infinity.
#[cube]
pub(in crate::kernels) fn magnitude_bits(value: f32) -> u32 {
    u32::reinterpret(value) & 0x7FFF_FFFFu32
}

/// A value in the dtype of an output.
///
/// The rounding to bf16 is done here, for CubeCL 0.11's CPU runtime fails to link LLVM's where the processor has no
/// instruction for it (`__truncsfbf2`), and gives zeros.
#[cube]
pub(in crate::kernels) fn float_to<F: Numeric>(value: f32, #[comptime] bf16: bool) -> F {
    if bf16 {
        let bits = u32::reinterpret(value);
        let odd = (bits >> 16u32) & 1u32;
        let rounded = (bits + 0x7FFFu32 + odd) >> 16u32;
        // A NaN could carry into the sign: keep it quiet instead.
        let nan = (bits >> 16u32) | 0x40u32;
        let word = select(magnitude_bits(value) > 0x7F80_0000u32, nan, rounded);
        F::reinterpret(u16::cast_from(word))
    } else {
        F::cast_from(value)
    }
}
