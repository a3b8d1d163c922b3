//! The two fp8 formats and their exact casts.
//!
//! The formats are those of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433). For values in range, casts
//! equal those of ml_dtypes and torch (`float8_e4m3fn`, `float8_e5m2`) bit for bit. Out of range they saturate, like CUDA's
//! `SATFINITE`.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// An 8-bit floating-point format.
///
/// | | `E4M3` (`float8_e4m3fn`) | `E5M2` (`float8_e5m2`) |
/// |---|---|---|
/// | largest finite value | 448 | 57344 |
/// | smallest normal | 2^-6 | 2^-14 |
/// | smallest subnormal | 2^-9 | 2^-16 |
/// | infinities | none | 0x7C, 0xFC |
/// | NaN | 0x7F, 0xFF | 0x7D..=0x7F, 0xFD..=0xFF |
///
/// ```
/// use burn_fp8::Fp8Format;
///
/// let code = Fp8Format::E4M3.encode(0.3);
/// assert_eq!(Fp8Format::E4M3.decode(code), 0.3125);
/// assert_eq!(Fp8Format::E4M3.decode(Fp8Format::E4M3.encode(1e9)), 448.0); // saturates
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Fp8Format {
    /// 4 exponent bits, 3 mantissa bits: more precise, for activations and weights.
    E4M3,
    /// 5 exponent bits, 2 mantissa bits: more range, for gradients.
    E5M2,
}

const F32_MANTISSA_BITS: u32 = f32::MANTISSA_DIGITS - 1;
const F32_BIAS: u32 = 127;
const F32_INFINITY: u32 = f32::INFINITY.to_bits();

static E4M3_VALUES: [f32; 256] = decode_table(Fp8Format::E4M3);
static E5M2_VALUES: [f32; 256] = decode_table(Fp8Format::E5M2);

impl Fp8Format {
    /// Both formats.
    pub const ALL: [Self; 2] = [Self::E4M3, Self::E5M2];

    /// The number of mantissa bits, without the hidden one.
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4M3 => 3,
            Self::E5M2 => 2,
        }
    }

    /// Exponent bias.
    pub const fn bias(self) -> u32 {
        match self {
            Self::E4M3 => 7,
            Self::E5M2 => 15,
        }
    }

    /// The largest finite value: 448 or 57344.
    pub const fn max(self) -> f32 {
        match self {
            Self::E4M3 => 448.0,
            Self::E5M2 => 57344.0,
        }
    }

    /// The code of [`max`](Self::max).
    pub const fn max_code(self) -> u8 {
        match self {
            Self::E4M3 => 0x7E,
            Self::E5M2 => 0x7B,
        }
    }

    /// The code that this crate writes for NaN (apart from the sign): 0x7F or 0x7E, as in torch and ml_dtypes.
    pub const fn nan_code(self) -> u8 {
        match self {
            Self::E4M3 => 0x7F,
            Self::E5M2 => 0x7E,
        }
    }

    /// The smallest positive normal value: 2^-6 or 2^-14.
    pub const fn min_positive(self) -> f32 {
        power_of_two(1 - self.bias() as i32)
    }

    /// The smallest positive value: 2^-9 or 2^-16.
    pub const fn min_subnormal(self) -> f32 {
        power_of_two(1 - self.bias() as i32 - self.mantissa_bits() as i32)
    }

    /// The distance from 1 to the next larger value: 0.125 or 0.25.
    pub const fn epsilon(self) -> f32 {
        power_of_two(-(self.mantissa_bits() as i32))
    }

    /// The scale that maps `amax` to [`max`](Self::max): `max / amax`. It is 1 if `amax` is zero, infinite or NaN, and the
    /// largest f32 if the quotient overflows (Transformer Engine's rule).
    pub fn scale_for(self, amax: f32) -> f32 {
        if amax.is_finite() && amax > 0.0 {
            (self.max() / amax).min(f32::MAX)
        } else {
            1.0
        }
    }

    /// [`scale_for`](Self::scale_for), rounded down to a power of two if `power_of_two` is true (Transformer Engine's and
    /// torchao's rule).
    ///
    /// ```
    /// use burn_fp8::Fp8Format;
    ///
    /// assert_eq!(Fp8Format::E4M3.rounded_scale_for(3.0, true), 128.0); // 448 / 3 = 149.3
    /// ```
    pub fn rounded_scale_for(self, amax: f32, power_of_two: bool) -> f32 {
        let scale = self.scale_for(amax);
        match power_of_two {
            // Clears the mantissa. Scales are never subnormal.
            true => f32::from_bits(scale.to_bits() & !((1 << F32_MANTISSA_BITS) - 1)),
            false => scale,
        }
    }

    /// Casts to fp8: to the nearest value, ties to even. Infinities and values out of range saturate to the largest finite value,
    /// and NaN stays NaN. The sign is kept, also that of zero.
    #[inline]
    pub const fn encode(self, value: f32) -> u8 {
        let shift = F32_MANTISSA_BITS - self.mantissa_bits();
        let bits = value.to_bits();
        let sign = (bits >> 24) as u8 & 0x80;
        let magnitude = bits & 0x7FFF_FFFF;

        // Below the smallest normal: the last place of `anchor` is the step between subnormals, so the FPU's addition rounds to
        // it.
        let anchor = power_of_two(1 - self.bias() as i32 + shift as i32);
        let subnormal = (f32::from_bits(magnitude) + anchor)
            .to_bits()
            .wrapping_sub(anchor.to_bits());

        // Above: rebias the exponent, add just under half a last place (plus the odd bit), and cut off the rest.
        let odd = (magnitude >> shift) & 1;
        let rebias = (F32_BIAS - self.bias()) << F32_MANTISSA_BITS;
        let normal = magnitude
            .wrapping_sub(rebias)
            .wrapping_add((1 << (shift - 1)) - 1 + odd)
            >> shift;

        let code = if magnitude < self.min_positive().to_bits() {
            subnormal
        } else {
            normal
        };
        let max = self.max_code() as u32;
        let code = if magnitude >= self.max().to_bits() {
            max
        } else {
            code
        };
        let code = if magnitude > F32_INFINITY {
            self.nan_code() as u32
        } else {
            code
        };
        code as u8 | sign
    }

    /// Casts a bf16 to fp8; see [`encode`](Self::encode). No rounding happens before that, because f32 holds every bf16 exactly.
    #[inline]
    pub fn encode_bf16(self, value: bf16) -> u8 {
        self.encode(value.to_f32())
    }

    /// Casts an f16 to fp8; see [`encode`](Self::encode). No rounding happens before that, because f32 holds every f16 exactly.
    #[inline]
    pub fn encode_f16(self, value: f16) -> u8 {
        self.encode(value.to_f32())
    }

    /// The value of a code. f32, bf16 and f16 hold every value of both formats exactly.
    #[inline]
    pub fn decode(self, code: u8) -> f32 {
        self.values()[code as usize]
    }

    /// The values of all 256 codes.
    pub fn values(self) -> &'static [f32; 256] {
        match self {
            Self::E4M3 => &E4M3_VALUES,
            Self::E5M2 => &E5M2_VALUES,
        }
    }
}

/// 2^exponent, which must be a normal f32.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((F32_BIAS as i32 + exponent) as u32) << F32_MANTISSA_BITS)
}

const fn decode_table(format: Fp8Format) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = decode_code(format, code as u32);
        code += 1;
    }
    values
}

const fn decode_code(format: Fp8Format, code: u32) -> f32 {
    let mantissa_bits = format.mantissa_bits();
    let magnitude = code & 0x7F;
    let sign = (code & 0x80) << 24;
    let infinity = format.max_code() as u32 + 1;
    let bits = match format {
        Fp8Format::E5M2 if magnitude == infinity => F32_INFINITY,
        _ if magnitude > format.max_code() as u32 => f32::NAN.to_bits(),
        _ if magnitude >> mantissa_bits == 0 => {
            (magnitude as f32 * format.min_subnormal()).to_bits()
        }
        _ => {
            (magnitude << (F32_MANTISSA_BITS - mantissa_bits))
                + ((F32_BIAS - format.bias()) << F32_MANTISSA_BITS)
        }
    };
    f32::from_bits(bits | sign)
}
