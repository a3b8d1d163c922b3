//! The values of codes, by OCP's 8-bit floating point specification (OFP8), section 5.

use std::sync::LazyLock;

/// The format of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8 {
    /// 4 bits of exponent, 3 of mantissa.
    E4m3,
    /// 5 bits of exponent, 2 of mantissa.
    E5m2,
}

impl Fp8 {
    pub(super) fn named(name: &str) -> Option<Self> {
        match name {
            "e4m3" => Some(Self::E4m3),
            "e5m2" => Some(Self::E5m2),
            _ => None,
        }
    }

    /// The value of a code.
    pub fn value(self, code: u8) -> f64 {
        let sign = if code < 0x80 { 1.0 } else { -1.0 };
        let (mantissa_bits, bias) = match self {
            Self::E4m3 => (3, 7),
            Self::E5m2 => (2, 15),
        };
        let magnitude = code & 0x7F;
        let (exponent, mantissa) = (
            magnitude >> mantissa_bits,
            magnitude & ((1 << mantissa_bits) - 1),
        );
        match (self, magnitude) {
            (Self::E4m3, 0x7F) | (Self::E5m2, 0x7D..) => return f64::NAN,
            (Self::E5m2, 0x7C) => return sign * f64::INFINITY,
            _ => {}
        }
        let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
        sign * match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(i32::from(exponent) - bias),
        }
    }

    /// The result of `cvt.rn.satfinite`: the code of the nearest finite value, or the one with an even mantissa if two are
    /// equally near; the canonical code for NaN.
    pub(super) fn nearest(self, value: f32) -> u8 {
        if value.is_nan() {
            return 0x7F;
        }
        let finite = || (0..0x80u8).filter(|code| self.values()[usize::from(*code)].is_finite());
        let largest = self.values()[usize::from(finite().next_back().unwrap())];
        let magnitude = f64::from(value.abs()).min(largest);
        let distance = |code: u8| (self.values()[usize::from(code)] - magnitude).abs();
        let code = finite().min_by(|&one, &other| {
            let order = distance(one).partial_cmp(&distance(other)).unwrap();
            order.then((one % 2).cmp(&(other % 2)))
        });
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        code.unwrap() | sign
    }

    /// The values of all codes.
    pub(super) fn values(self) -> &'static [f64; 256] {
        static VALUES: [LazyLock<[f64; 256]>; 2] = [
            LazyLock::new(|| Fp8::E4m3.table()),
            LazyLock::new(|| Fp8::E5m2.table()),
        ];
        &VALUES[self as usize]
    }

    fn table(self) -> [f64; 256] {
        std::array::from_fn(|code| self.value(code as u8))
    }
}
