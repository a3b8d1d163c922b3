//! `mma.sync.m16n8k32` for fp8: 16 rows, 8 columns and 32 terms, spread over the 32 threads of a warp.

use std::ops::Range;

use super::{
    Result,
    block::{Block, WARP},
    decode::{Operands, Value},
    fp8::Fp8,
    parse::Register,
};

pub(super) struct Mma {
    to: Vec<Register>,
    left: Vec<Value>,
    right: Vec<Value>,
    add: Vec<Value>,
    formats: [Fp8; 2],
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Mma> {
    let formats = opcode.strip_prefix("mma.sync.aligned.m16n8k32.row.col.f32.")?;
    let (left, right) = formats.strip_suffix(".f32")?.split_once('.')?;
    let mma = Mma {
        to: operands.registers(0),
        left: operands.values(1),
        right: operands.values(2),
        add: operands.values(3),
        formats: [Fp8::named(left)?, Fp8::named(right)?],
    };
    let registers = [mma.to.len(), mma.left.len(), mma.right.len(), mma.add.len()];
    assert_eq!(registers, [4, 4, 2, 4], "{}", operands.text());
    Some(mma)
}

impl Block<'_> {
    /// The layout is that of "Matrix Fragments for mma.m16n8k32" in the PTX ISA, for 8-bit elements.
    pub(super) fn mma(&mut self, mma: &Mma, warp: Range<usize>) -> Result<()> {
        let values = mma.formats.map(Fp8::values);
        let (mut left, mut right) = ([[0.0; 32]; 16], [[0.0; 32]; 8]);
        let mut sums = [[0.0; 8]; 16];
        for lane in 0..WARP {
            let thread = warp.start + lane;
            let (group, member) = (lane / 4, lane % 4);
            for i in 0..16 {
                let row = if i < 4 || (8..12).contains(&i) {
                    group
                } else {
                    group + 8
                };
                let column = member * 4 + i % 4 + if i < 8 { 0 } else { 16 };
                left[row][column] = values[0][self.byte(thread, &mma.left, i)?];
            }
            for i in 0..8 {
                let term = member * 4 + i % 4 + if i < 4 { 0 } else { 16 };
                right[group][term] = values[1][self.byte(thread, &mma.right, i)?];
            }
            for i in 0..4 {
                let (row, column) = sum_place(lane, i);
                let value = self.value(thread, mma.add[i])?;
                sums[row][column] = f64::from(f32::from_bits(value as u32));
            }
        }
        for lane in 0..WARP {
            for i in 0..4 {
                let (row, column) = sum_place(lane, i);
                let terms = left[row].iter().zip(&right[column]).map(|(x, y)| x * y);
                let sum = (sums[row][column] + terms.sum::<f64>()) as f32;
                self.threads[warp.start + lane].set(mma.to[i], u64::from(sum.to_bits()))?;
            }
        }
        Ok(())
    }

    /// Byte `i` of several registers.
    fn byte(&mut self, thread: usize, registers: &[Value], i: usize) -> Result<usize> {
        let register = self.value(thread, registers[i / 4])?;
        Ok((register >> (8 * (i % 4)) & 0xFF) as usize)
    }
}

fn sum_place(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + if i < 2 { 0 } else { 8 }, lane % 4 * 2 + i % 2)
}
