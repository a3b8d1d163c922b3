//! The floats of PTX: their bits, and rounding to them. All but f64 are exact in f64, in which they are computed with.

use half::{bf16, f16};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    F64,
    F32,
    F16,
    Bf16,
}

/// Rounding: to nearest with ties to even, towards zero, down, or up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

impl Round {
    pub(super) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "rn" | "rni" => Self::Nearest,
            "rz" | "rzi" => Self::Zero,
            "rm" | "rmi" => Self::Down,
            "rp" | "rpi" => Self::Up,
            _ => return None,
        })
    }

    /// The integer that a value is rounded to.
    pub(super) fn integer(self, value: f64) -> f64 {
        match self {
            Self::Nearest => value.round_ties_even(),
            Self::Zero => value.trunc(),
            Self::Down => value.floor(),
            Self::Up => value.ceil(),
        }
    }
}

impl Format {
    pub(super) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "f64" => Self::F64,
            "f32" => Self::F32,
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            _ => return None,
        })
    }

    pub(super) fn value(self, bits: u64) -> f64 {
        match self {
            Self::F64 => f64::from_bits(bits),
            Self::F32 => f64::from(f32::from_bits(bits as u32)),
            Self::F16 => f64::from(f32::from(f16::from_bits(bits as u16))),
            Self::Bf16 => f64::from(f32::from(bf16::from_bits(bits as u16))),
        }
    }

    /// Without the sign of zero: a subnormal becomes zero.
    pub(super) fn flushed(self, bits: u64) -> u64 {
        match self {
            Self::F32 if bits & 0x7F80_0000 == 0 => bits & 0x8000_0000,
            _ => bits,
        }
    }

    /// The bits that a NaN has as the result of an instruction.
    pub(super) fn nan(self) -> u64 {
        match self {
            Self::F64 => 0x7FFF_FFFF_FFFF_FFFF,
            Self::F32 => 0x7FFF_FFFF,
            Self::F16 | Self::Bf16 => 0x7FFF,
        }
    }

    /// The bits of a value, rounded.
    pub(super) fn bits(self, value: f64, round: Round) -> u64 {
        if value.is_nan() {
            return self.nan();
        }
        let nearest = match self {
            Self::F64 => value.to_bits(),
            Self::F32 => u64::from((value as f32).to_bits()),
            Self::F16 => u64::from(f16::from_f32(f32_to_odd(value)).to_bits()),
            Self::Bf16 => u64::from(bf16::from_f32(f32_to_odd(value)).to_bits()),
        };
        if round == Round::Nearest || value.is_infinite() || value == self.value(nearest) {
            return nearest;
        }
        let away = self.value(nearest).abs() > value.abs();
        let towards_zero = match round {
            Round::Zero => true,
            Round::Down => value > 0.0,
            _ => value < 0.0,
        };
        // Neighbors of one sign have consecutive bits.
        match (towards_zero, away) {
            (true, true) => nearest - 1,
            (false, false) => nearest + 1,
            _ => nearest,
        }
    }
}

/// A sum, and if it is not exact, that of its two neighbors whose last bit is 1: rounding that to fewer bits is rounding the exact
/// sum (Boldo and Melquiond, 2008).
pub(super) fn sum_to_odd(one: f64, other: f64) -> f64 {
    let sum = one + other;
    if !sum.is_finite() {
        return sum;
    }
    // Knuth's TwoSum.
    let added = sum - one;
    let error = (one - (sum - added)) + (other - added);
    to_odd(sum, error)
}

/// The same of a value that is `nearest` and a small `error`.
pub(super) fn to_odd(nearest: f64, error: f64) -> f64 {
    if error == 0.0 || nearest.to_bits() % 2 == 1 {
        return nearest;
    }
    match error > 0.0 {
        true => nearest.next_up(),
        false => nearest.next_down(),
    }
}

/// The f32 that equals a value, or its neighbor whose last bit is 1.
fn f32_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let exact = f64::from(nearest);
    if exact == value || nearest.to_bits() % 2 == 1 {
        return nearest;
    }
    match value > exact {
        true => nearest.next_up(),
        false => nearest.next_down(),
    }
}
