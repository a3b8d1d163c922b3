//! `shfl.sync.bfly`: threads of a warp exchange values.

use std::ops::Range;

use super::{
    Result,
    block::{Block, WARP},
    decode::{Operands, Value},
    parse::Register,
};

pub(super) struct Shuffle {
    to: Register,
    from: Value,
    /// What a thread's number is combined with, by exclusive or, to that of the thread whose value it takes.
    mask: u64,
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Shuffle> {
    if opcode != "shfl.sync.bfly.b32" {
        return None;
    }
    // Of the whole warp, in one segment.
    let members = [operands.constant(3), operands.constant(4) & 0xFFFF_FFFF];
    let mask = operands.constant(2);
    assert_eq!(members, [0x1F, 0xFFFF_FFFF], "{}", operands.text());
    assert!(mask < WARP as u64, "{}", operands.text());
    Some(Shuffle {
        to: operands.register(0),
        from: operands.value(1),
        mask,
    })
}

impl Block<'_> {
    pub(super) fn shuffle(&mut self, shuffle: &Shuffle, warp: Range<usize>) -> Result<()> {
        let values: Vec<u64> = warp
            .clone()
            .map(|thread| self.value(thread, shuffle.from))
            .collect::<Result<_>>()?;
        for (lane, thread) in warp.enumerate() {
            let taken = values[lane ^ shuffle.mask as usize];
            self.threads[thread].set(shuffle.to, taken)?;
        }
        Ok(())
    }
}
