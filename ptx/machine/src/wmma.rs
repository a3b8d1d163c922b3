//! `wmma`: products of matrices whose pieces a warp loads, multiplies and stores without knowing who holds which.
//!
//! The ISA leaves open which thread holds which elements. Here each holds as many that follow each other, row by row; where registers
//! have room for more than there are, all elements are there twice.

use std::ops::Range;

use super::{
    Result,
    block::{Block, WARP},
    decode::{Operands, Place, Value},
    mma::Kind as Element,
    number::{Format, Round},
    parse::Register,
    thread::State,
    transfer::Space,
};

pub(super) enum Operation {
    Load {
        to: Vec<Register>,
        place: Place,
        stride: Value,
        matrix: Matrix,
    },
    Store {
        from: Vec<Value>,
        place: Place,
        stride: Value,
        matrix: Matrix,
    },
    Multiply {
        to: Vec<Register>,
        left: Vec<Value>,
        right: Vec<Value>,
        add: Vec<Value>,
        /// Rows, columns, and terms.
        sizes: [usize; 3],
        kinds: [Element; 2],
        /// Of the result, and of what is added.
        sums: [Format; 2],
    },
}

/// A matrix in memory.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    rows: usize,
    columns: usize,
    by_rows: bool,
    space: Space,
    /// The bytes of an element.
    bytes: usize,
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Operation> {
    let words: Vec<&str> = opcode.strip_prefix("wmma.")?.split('.').collect();
    match words[..] {
        [
            "load",
            which,
            "sync",
            "aligned",
            layout,
            shape,
            ref rest @ ..,
            kind,
        ] => {
            let to = operands.registers(0);
            let matrix = matrix(which, layout, shape, rest, kind)?;
            holds(to.len(), matrix).then(|| Operation::Load {
                to,
                place: operands.place(1),
                stride: operands.value(2),
                matrix,
            })
        }
        [
            "store",
            "d",
            "sync",
            "aligned",
            layout,
            shape,
            ref rest @ ..,
            kind,
        ] => {
            let from = operands.values(1);
            let matrix = matrix("d", layout, shape, rest, kind)?;
            holds(from.len(), matrix).then(|| Operation::Store {
                from,
                place: operands.place(0),
                stride: operands.value(2),
                matrix,
            })
        }
        // The types of f16 operands are not named.
        [
            "mma",
            "sync",
            "aligned",
            _,
            _,
            shape,
            result,
            ref kinds @ ..,
            added,
        ] => {
            let half = Element::Half(Format::F16);
            let kinds = match kinds {
                [] => [half; 2],
                [left, right] => [Element::named(left)?, Element::named(right)?],
                _ => return None,
            };
            Some(Operation::Multiply {
                to: operands.registers(0),
                left: operands.values(1),
                right: operands.values(2),
                add: operands.values(3),
                sizes: sizes(shape)?,
                kinds,
                sums: [Format::named(result)?, Format::named(added)?],
            })
        }
        _ => None,
    }
}

/// `m16n16k16`.
fn sizes(shape: &str) -> Option<[usize; 3]> {
    let (rows, rest) = shape.strip_prefix('m')?.split_once('n')?;
    let (columns, terms) = rest.split_once('k')?;
    Some([
        rows.parse().ok()?,
        columns.parse().ok()?,
        terms.parse().ok()?,
    ])
}

fn matrix(which: &str, layout: &str, shape: &str, space: &[&str], kind: &str) -> Option<Matrix> {
    let [rows, columns, terms] = sizes(shape)?;
    let (rows, columns) = match which {
        "a" => (rows, terms),
        "b" => (terms, columns),
        "c" | "d" => (rows, columns),
        _ => return None,
    };
    let space = match space {
        [] => Space::Generic,
        ["global"] => Space::Global,
        ["shared" | "shared::cta"] => Space::Shared,
        _ => return None,
    };
    let bytes = match kind {
        "f16" | "bf16" => 2,
        "f32" | "tf32" => 4,
        _ => return None,
    };
    Some(Matrix {
        rows,
        columns,
        by_rows: layout == "row",
        space,
        bytes,
    })
}

fn holds(registers: usize, matrix: Matrix) -> bool {
    (registers * 4 / matrix.bytes * WARP).is_multiple_of(matrix.rows * matrix.columns)
}

/// The element, of `count`, that a lane holds in place `i` of its `held`.
fn held_element(lane: usize, held: usize, i: usize, count: usize) -> usize {
    (lane * held + i) % count
}

impl Block<'_> {
    pub(super) fn wmma(&mut self, operation: &Operation, warp: Range<usize>) -> Result<()> {
        match operation {
            Operation::Load {
                to,
                place,
                stride,
                matrix,
            } => {
                let in_register = 4 / matrix.bytes;
                let held = to.len() * in_register;
                for lane in 0..WARP {
                    let thread = warp.start + lane;
                    let mut registers = vec![0; to.len()];
                    for i in 0..held {
                        let at = self.element(thread, place, *stride, matrix, lane, held, i)?;
                        let bits = self.load_from(thread, matrix.space, at, matrix.bytes)?;
                        registers[i / in_register] |=
                            bits << (8 * matrix.bytes * (i % in_register));
                    }
                    for (register, value) in to.iter().zip(registers) {
                        self.threads[thread].set(*register, value)?;
                    }
                }
            }
            Operation::Store {
                from,
                place,
                stride,
                matrix,
            } => {
                let in_register = 4 / matrix.bytes;
                let held = from.len() * in_register;
                let count = matrix.rows * matrix.columns;
                let exited = |lane: &usize| self.threads[warp.start + lane].state == State::Exited;
                let lanes: Vec<usize> = (0..WARP).filter(|lane| !exited(lane)).collect();
                for lane in lanes {
                    let thread = warp.start + lane;
                    for i in (0..held).filter(|i| lane * held + i < count) {
                        let at = self.element(thread, place, *stride, matrix, lane, held, i)?;
                        let register = self.value(thread, from[i / in_register])?;
                        let bits = register >> (8 * matrix.bytes * (i % in_register));
                        self.store_to(thread, matrix.space, at, matrix.bytes, bits)?;
                    }
                }
            }
            Operation::Multiply {
                to,
                left,
                right,
                add,
                sizes: [rows, columns, terms],
                kinds,
                sums,
            } => {
                let gather = |block: &mut Self, from: &[Value], bytes: usize, count: usize| {
                    let in_register = 4 / bytes;
                    let held = from.len() * in_register;
                    let mut elements = vec![0; count];
                    for lane in 0..WARP {
                        for i in 0..held {
                            let register = block.value(warp.start + lane, from[i / in_register])?;
                            let bits = register >> (8 * bytes * (i % in_register));
                            elements[held_element(lane, held, i, count)] = bits;
                        }
                    }
                    Ok::<_, String>(elements)
                };
                let size_of = |format| match format {
                    Format::F32 => 4,
                    _ => 2,
                };
                let a = gather(self, left, kinds[0].bytes(), rows * terms)?;
                let b = gather(self, right, kinds[1].bytes(), terms * columns)?;
                let c = gather(self, add, size_of(sums[1]), rows * columns)?;
                let mut results = vec![0; rows * columns];
                for row in 0..*rows {
                    for column in 0..*columns {
                        let product = |term| {
                            let (x, y) = (a[row * terms + term], b[term * columns + column]);
                            kinds[0].value(x) * kinds[1].value(y)
                        };
                        let place = row * columns + column;
                        let added = match sums[1] {
                            Format::F32 => sums[1].value(c[place] & 0xFFFF_FFFF),
                            format => format.value(c[place] & 0xFFFF),
                        };
                        let sum = added + (0..*terms).map(product).sum::<f64>();
                        results[place] = sums[0].bits(sum, Round::Nearest);
                    }
                }
                let bytes = size_of(sums[0]);
                let in_register = 4 / bytes;
                let held = to.len() * in_register;
                for lane in 0..WARP {
                    for (number, register) in to.iter().enumerate() {
                        let bits = (0..in_register).fold(0, |bits, i| {
                            let element =
                                held_element(lane, held, number * in_register + i, results.len());
                            bits | results[element] << (8 * bytes * i)
                        });
                        self.threads[warp.start + lane].set(*register, bits)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The address of an element that a lane holds.
    #[allow(clippy::too_many_arguments)]
    fn element(
        &mut self,
        thread: usize,
        place: &Place,
        stride: Value,
        matrix: &Matrix,
        lane: usize,
        held: usize,
        i: usize,
    ) -> Result<u64> {
        let start = self.address(thread, place)?;
        let stride = self.value(thread, stride)?;
        let number = held_element(lane, held, i, matrix.rows * matrix.columns);
        let (row, column) = (
            (number / matrix.columns) as u64,
            (number % matrix.columns) as u64,
        );
        let offset = match matrix.by_rows {
            true => row * stride + column,
            false => column * stride + row,
        };
        Ok(start + offset * matrix.bytes as u64)
    }
}
