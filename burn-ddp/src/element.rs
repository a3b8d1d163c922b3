//! What can be reduced: element types and reduction operators.

use std::fmt::Debug;

use bytemuck::Pod;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use strum::{Display, VariantArray};

/// How the values of all ranks are combined.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Display, VariantArray,
)]
#[strum(serialize_all = "lowercase")]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum. Integers wrap around.
    Sum = 0,
    /// The sum divided by the number of ranks. Floats only.
    Mean = 1,
    /// The smallest value. A NaN of any rank wins.
    Min = 2,
    /// The largest value. A NaN of any rank wins.
    Max = 3,
    /// The product. Integers wrap around.
    Product = 4,
}

/// A type of element that a message can hold.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Display, VariantArray,
)]
#[strum(serialize_all = "lowercase")]
#[allow(missing_docs)]
#[repr(u8)]
pub enum ElementType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    U64 = 6,
    I64 = 7,
    F16 = 8,
    BF16 = 9,
    F32 = 10,
    F64 = 11,
}

impl ElementType {
    /// Whether means can be taken.
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::BF16 | Self::F32 | Self::F64)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// An element that the collectives can carry and reduce: integers of 8 to 64 bits, `f16`, `bf16`,
/// `f32` and `f64`.
pub trait Element: Pod + PartialEq + Debug + Send + Sync + sealed::Sealed {
    /// Its type, as named in messages and errors.
    const TYPE: ElementType;

    /// The type in which values are combined: `f32` for the 16-bit floats, itself for the others.
    type Accumulator: Element;

    /// Whether means can be taken.
    const IS_FLOAT: bool;

    /// Widens to the accumulator.
    fn widen(self) -> Self::Accumulator;

    /// Rounds an accumulated value (to nearest, ties to even).
    fn narrow(value: Self::Accumulator) -> Self;

    /// Combines two values; the mean combines as the sum does.
    fn combine(op: ReduceOp, a: Self, b: Self) -> Self;

    /// Divides a sum by the number of ranks.
    fn divide(self, ranks: usize) -> Self;
}

/// Combines `other` into `into`, element by element.
pub(crate) fn combine_slices<T: Element>(op: ReduceOp, into: &mut [T], other: &[T]) {
    // One match outside, one tight loop inside: the compiler vectorizes each.
    macro_rules! each {
        ($op:expr) => {
            for (a, b) in into.iter_mut().zip(other) {
                *a = T::combine($op, *a, *b);
            }
        };
    }
    match op {
        ReduceOp::Sum | ReduceOp::Mean => each!(ReduceOp::Sum),
        ReduceOp::Min => each!(ReduceOp::Min),
        ReduceOp::Max => each!(ReduceOp::Max),
        ReduceOp::Product => each!(ReduceOp::Product),
    }
}

macro_rules! integers {
    ($($t:ty => $name:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const TYPE: ElementType = ElementType::$name;
            const IS_FLOAT: bool = false;
            type Accumulator = Self;

            fn widen(self) -> Self { self }
            fn narrow(value: Self) -> Self { value }

            #[inline(always)]
            fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => a.wrapping_add(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Product => a.wrapping_mul(b),
                }
            }

            fn divide(self, ranks: usize) -> Self { self / ranks as $t }
        }
    )*};
}

macro_rules! floats {
    ($($t:ty => $name:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const TYPE: ElementType = ElementType::$name;
            const IS_FLOAT: bool = true;
            type Accumulator = Self;

            fn widen(self) -> Self { self }
            fn narrow(value: Self) -> Self { value }

            #[inline(always)]
            fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => a + b,
                    ReduceOp::Product => a * b,
                    // The comparison is false for a NaN, so that a NaN in `a` stays and one in
                    // `b` is taken by the second test.
                    ReduceOp::Min => if b < a || b.is_nan() { b } else { a },
                    ReduceOp::Max => if b > a || b.is_nan() { b } else { a },
                }
            }

            fn divide(self, ranks: usize) -> Self { self / ranks as $t }
        }
    )*};
}

macro_rules! halves {
    ($($t:ty => $name:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const TYPE: ElementType = ElementType::$name;
            const IS_FLOAT: bool = true;
            type Accumulator = f32;

            fn widen(self) -> f32 { self.to_f32() }
            fn narrow(value: f32) -> Self { Self::from_f32(value) }

            fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
                Self::narrow(f32::combine(op, a.widen(), b.widen()))
            }

            fn divide(self, ranks: usize) -> Self {
                Self::narrow(self.widen().divide(ranks))
            }
        }
    )*};
}

integers!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64);
floats!(f32 => F32, f64 => F64);
halves!(f16 => F16, bf16 => BF16);
