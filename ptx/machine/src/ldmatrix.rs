//! `ldmatrix` and `stmatrix`: a warp moves matrices of 8 x 8 halves between shared memory and registers, as `mma.sync` has them.

use std::ops::Range;

use super::{
    Result,
    block::{Block, WARP},
    decode::{Operands, Place, Value},
    parse::Register,
};

pub(super) struct Operation {
    kind: Kind,
    /// Where a row of one of the matrices is: of matrix `i` those of the threads from `8 * i` on.
    row: Place,
    transposed: bool,
}

enum Kind {
    Load(Vec<Register>),
    Store(Vec<Value>),
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Operation> {
    let (name, rest) = opcode.split_once(".sync.aligned.m8n8.x")?;
    let (count, rest) = rest.split_once('.')?;
    let (transposed, rest) = match rest.strip_prefix("trans.") {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    let (kind, row, found) = match name {
        "ldmatrix" => {
            let to = operands.registers(0);
            let found = to.len();
            (Kind::Load(to), operands.place(1), found)
        }
        "stmatrix" => {
            let from = operands.values(1);
            let found = from.len();
            (Kind::Store(from), operands.place(0), found)
        }
        _ => return None,
    };
    let known = ["shared.b16", "shared::cta.b16"].contains(&rest) && count.parse() == Ok(found);
    known.then_some(Operation {
        kind,
        row,
        transposed,
    })
}

impl Block<'_> {
    pub(super) fn ldmatrix(&mut self, operation: &Operation, warp: Range<usize>) -> Result<()> {
        let thread = |lane: usize| warp.start + lane;
        // Where the two elements of a lane's register are: row and column.
        let elements = |lane: usize| {
            [0, 1].map(|i| {
                let (across, along) = (lane / 4, lane % 4 * 2 + i);
                match operation.transposed {
                    true => (along, across),
                    false => (across, along),
                }
            })
        };
        let count = match &operation.kind {
            Kind::Load(to) => to.len(),
            Kind::Store(from) => from.len(),
        };
        for matrix in 0..count {
            let mut rows = [0; 8];
            for (number, row) in rows.iter_mut().enumerate() {
                *row = self.address(thread(8 * matrix + number), &operation.row)?;
                if !row.is_multiple_of(16) {
                    return Err(format!("a row of a matrix at {row:#x}"));
                }
            }
            for lane in 0..WARP {
                let places = elements(lane).map(|(row, column)| rows[row] + 2 * column as u64);
                match &operation.kind {
                    Kind::Load(to) => {
                        let mut register = 0;
                        for (i, place) in places.into_iter().enumerate() {
                            register |= self.load_shared(thread(lane), place, 2)? << (16 * i);
                        }
                        self.threads[thread(lane)].set(to[matrix], register)?;
                    }
                    Kind::Store(from) => {
                        let register = self.value(thread(lane), from[matrix])?;
                        for (i, place) in places.into_iter().enumerate() {
                            let half = register >> (16 * i) & 0xFFFF;
                            self.store_shared(thread(lane), place, 2, half)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
