//! What ranks pass to calls, and what reductions of it must give.

use burn::tensor::{
    Float, Int,
    kind::{Autodiff, Numeric},
};
use burn_ddp::{ElementType, ReduceOp};
use half::{bf16, f16};

use crate::suite::collectives::{Sample, combine};

/// An element that tensors may have.
pub(crate) trait Value: Sample + burn::tensor::Element {
    type Kind: Numeric + Autodiff + 'static;
}

macro_rules! values {
    ($($kind:ty: $($t:ty)*;)*) => {$($(
        impl Value for $t {
            type Kind = $kind;
        }
    )*)*};
}

values! {
    Float: f16 bf16 f32 f64;
    Int: u8 i8 u16 i16 u32 i32 u64 i64;
}

/// Runs code with `$t` as the type of the elements.
macro_rules! typed {
    ($of:expr, $t:ident => $body:expr) => {{
        use burn_ddp::ElementType as E;
        macro_rules! with {
            ($type:ty) => {{
                type $t = $type;
                $body
            }};
        }
        match $of {
            E::U8 => with!(u8),
            E::I8 => with!(i8),
            E::U16 => with!(u16),
            E::I16 => with!(i16),
            E::U32 => with!(u32),
            E::I32 => with!(i32),
            E::U64 => with!(u64),
            E::I64 => with!(i64),
            E::F16 => with!(half::f16),
            E::BF16 => with!(half::bf16),
            E::F32 => with!(f32),
            E::F64 => with!(f64),
        }
    }};
}

pub(super) use typed;

pub(crate) fn is_float(of: ElementType) -> bool {
    use ElementType::{BF16, F16, F32, F64};
    matches!(of, F16 | BF16 | F32 | F64)
}

/// SplitMix64 (Steele, Lea and Flood 2014).
pub(crate) fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Small whole numbers, whose sums and products are exact or rounded once; or any floats.
pub(crate) fn draw<T: Sample>(seed: u64, len: usize, any: bool) -> Vec<T> {
    const ODD: [f64; 6] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1e-42];
    let one = |index: usize| {
        let bits = mix(seed ^ index as u64);
        let value = match any {
            false => (bits % 5 + 1) as f64,
            true if bits.is_multiple_of(64) => ODD[(bits >> 32) as usize % ODD.len()],
            true => (bits >> 11) as f64 / (1u64 << 53) as f64 * 200.0 - 100.0,
        };
        T::from_f64(value)
    };
    (0..len).map(one).collect()
}

/// Checks an element of a reduction. Sums and products of any floats depend on the order, in the last digits.
pub(crate) fn is_reduced<T: Sample>(found: T, op: ReduceOp, parts: &[T], any: bool) -> bool {
    let values = || parts.iter().map(|value| value.to_f64());
    let is_nan = values().any(f64::is_nan);
    let exact = match op {
        ReduceOp::Min | ReduceOp::Max if is_nan => f64::NAN,
        _ => combine(op, values()),
    };
    let expected = T::from_f64(exact);
    let (found, expected) = (found.to_f64(), expected.to_f64());
    if found == expected || found.is_nan() && expected.is_nan() {
        return true;
    }
    // Of two values, one sum.
    if !any || parts.len() == 2 && op != ReduceOp::Product {
        return false;
    }
    let digits = match T::TYPE {
        ElementType::F64 => 1e-13,
        ElementType::F32 => 1e-5,
        ElementType::F16 => 2e-3,
        _ => 1e-2,
    };
    let scale = match op {
        ReduceOp::Product => exact.abs() + 1e-30,
        _ => values().map(f64::abs).sum(),
    };
    let near = (found - exact).abs() <= digits * scale;
    // A product may leave the range of the type on the way.
    let outside = op == ReduceOp::Product && (!exact.is_finite() || exact.abs() < 1e-4);
    matches!(op, ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Product) && (near || outside)
}
