//! `mma.sync`: products of small matrices that the 32 threads of a warp hold together.

use std::ops::Range;

use super::{
    Result,
    block::{Block, WARP},
    decode::{Operands, Value},
    fp8::Fp8,
    number::{Format, Round},
    parse::Register,
};

pub(super) struct Mma {
    to: Vec<Register>,
    left: Vec<Value>,
    right: Vec<Value>,
    add: Vec<Value>,
    /// The terms of a sum. The result has 16 rows and 8 columns.
    terms: usize,
    kinds: [Kind; 2],
    sums: Format,
}

/// The type of an operand's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Fp8(Fp8),
    /// f16 or bf16.
    Half(Format),
    /// f32 of which the lower 13 bits are not used.
    Tf32,
}

impl Kind {
    pub(super) fn named(name: &str) -> Option<Self> {
        match name {
            "tf32" => Some(Self::Tf32),
            "f16" | "bf16" => Format::named(name).map(Self::Half),
            _ => Fp8::named(name).map(Self::Fp8),
        }
    }

    /// The bytes of an element.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Fp8(_) => 1,
            Self::Half(_) => 2,
            Self::Tf32 => 4,
        }
    }

    pub(super) fn value(self, bits: u64) -> f64 {
        match self {
            Self::Fp8(format) => format.values()[(bits & 0xFF) as usize],
            Self::Half(format) => format.value(bits & 0xFFFF),
            Self::Tf32 => Format::F32.value(bits & 0xFFFF_E000),
        }
    }
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Mma> {
    let shape = opcode.strip_prefix("mma.sync.aligned.m16n8k")?;
    let (terms, kinds) = shape.split_once(".row.col.")?;
    let kinds: Vec<&str> = kinds.split('.').collect();
    let [sums, left, right, added] = kinds.try_into().ok()?;
    let mma = Mma {
        to: operands.registers(0),
        left: operands.values(1),
        right: operands.values(2),
        add: operands.values(3),
        terms: terms.parse().ok()?,
        kinds: [Kind::named(left)?, Kind::named(right)?],
        sums: Format::named(sums)?,
    };
    // A thread has 16 x terms / 32 elements of the left operand, half as many of the right one, and four sums.
    let left = mma.terms / 2 * mma.kinds[0].bytes() / 4;
    let sums = match mma.sums {
        Format::F16 => 2,
        _ => 4,
    };
    let registers = [mma.to.len(), mma.left.len(), mma.right.len(), mma.add.len()];
    let known =
        registers == [sums, left, left / 2, sums] && mma.kinds[0].bytes() == mma.kinds[1].bytes();
    (known && added == kind_of(mma.sums)).then_some(mma)
}

fn kind_of(sums: Format) -> &'static str {
    match sums {
        Format::F16 => "f16",
        _ => "f32",
    }
}

impl Block<'_> {
    /// The layouts are those of "Matrix Fragments for mma.m16n8k..." in the PTX ISA, which are one for all types: a register has
    /// neighbors in a row (of the left operand; the right one's column), registers alternate between the upper and the lower half of
    /// the rows, and then go on along the terms.
    pub(super) fn mma(&mut self, mma: &Mma, warp: Range<usize>) -> Result<()> {
        let in_register = 4 / mma.kinds[0].bytes();
        let mut left = vec![vec![0.0; mma.terms]; 16];
        let mut right = vec![vec![0.0; mma.terms]; 8];
        let mut sums = [[0.0; 8]; 16];
        for lane in 0..WARP {
            let thread = warp.start + lane;
            let (group, member) = (lane / 4, lane % 4);
            for (number, value) in mma.left.iter().enumerate() {
                let bits = self.value(thread, *value)?;
                let (row, first) = (group + number % 2 * 8, number / 2 * 4 * in_register);
                for i in 0..in_register {
                    let term = first + member * in_register + i;
                    left[row][term] = element(mma.kinds[0], bits, i);
                }
            }
            for (number, value) in mma.right.iter().enumerate() {
                let bits = self.value(thread, *value)?;
                let first = number * 4 * in_register;
                for i in 0..in_register {
                    let term = first + member * in_register + i;
                    right[group][term] = element(mma.kinds[1], bits, i);
                }
            }
            for i in 0..4 {
                let (row, column) = sum_place(lane, i);
                let bits = match mma.sums {
                    Format::F16 => self.value(thread, mma.add[i / 2])? >> (16 * (i % 2)) & 0xFFFF,
                    _ => self.value(thread, mma.add[i])?,
                };
                sums[row][column] = mma.sums.value(bits);
            }
        }
        for lane in 0..WARP {
            let results = [0, 1, 2, 3].map(|i| {
                let (row, column) = sum_place(lane, i);
                let terms = left[row].iter().zip(&right[column]).map(|(x, y)| x * y);
                let sum = sums[row][column] + terms.sum::<f64>();
                mma.sums.bits(sum, Round::Nearest)
            });
            let thread = &mut self.threads[warp.start + lane];
            for (i, register) in mma.to.iter().enumerate() {
                let bits = match mma.sums {
                    Format::F16 => results[2 * i + 1] << 16 | results[2 * i],
                    _ => results[i],
                };
                thread.set(*register, bits)?;
            }
        }
        Ok(())
    }
}

/// Element `i` of a register.
pub(super) fn element(kind: Kind, register: u64, i: usize) -> f64 {
    kind.value(register >> (8 * kind.bytes() * i))
}

fn sum_place(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + if i < 2 { 0 } else { 8 }, lane % 4 * 2 + i % 2)
}
