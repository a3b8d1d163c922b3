//! `cp.async`: copies of 16 bytes from global to shared memory, which arrive when a thread waits for their group.

use super::{
    Result,
    block::{Block, WARP},
    decode::{Operands, Place, Value},
    shared::{Author, Writer},
};

pub(super) enum Operation {
    /// Reads `size` bytes, and fills the rest of the 16 with zeros.
    Copy {
        to: Place,
        from: Place,
        size: Option<Value>,
    },
    Commit,
    /// Waits until no more than this number of groups is pending.
    Wait(usize),
}

/// The copies of a thread: committed groups, and copies that are not in a group yet.
#[derive(Debug, Default)]
pub(super) struct Copies {
    groups: Vec<Vec<Copy>>,
    open: Vec<Copy>,
}

#[derive(Debug)]
struct Copy {
    to: usize,
    from: u64,
    size: usize,
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Operation> {
    Some(match opcode {
        "cp.async.cg.shared.global" => {
            assert_eq!(operands.constant(2), 16, "{}", operands.text());
            Operation::Copy {
                to: operands.place(0),
                from: operands.place(1),
                size: (operands.count() == 4).then(|| operands.value(3)),
            }
        }
        "cp.async.commit_group" => Operation::Commit,
        "cp.async.wait_group" => Operation::Wait(operands.constant(0) as usize),
        _ => return None,
    })
}

impl Block<'_> {
    pub(super) fn copy(&mut self, thread: usize, operation: &Operation) -> Result<()> {
        match operation {
            Operation::Copy { to, from, size } => {
                let (to, from) = (self.address(thread, to)?, self.address(thread, from)?);
                let size = size.map_or(Ok(16), |size| self.value(thread, size))?;
                if size > 16 || !(to | from).is_multiple_of(16) {
                    return Err(format!("a copy of {size} bytes from {from:#x} to {to:#x}"));
                }
                let to = self.shared.index(to, 4)?;
                let heard = &self.threads[thread].heard;
                for word in to..to + 4 {
                    let author = Author {
                        thread,
                        warp: self.first_warp + thread / WARP,
                        heard,
                    };
                    self.shared.announce(word, &author, false)?;
                }
                let size = size as usize;
                self.threads[thread]
                    .copies
                    .open
                    .push(Copy { to, from, size });
            }
            Operation::Commit => {
                let copies = &mut self.threads[thread].copies;
                let group = std::mem::take(&mut copies.open);
                copies.groups.push(group);
            }
            Operation::Wait(most) => {
                let groups = &mut self.threads[thread].copies.groups;
                let done = groups.len().saturating_sub(*most);
                let done: Vec<Copy> = groups.drain(..done).flatten().collect();
                for copy in done {
                    self.land(thread, &copy)?;
                }
            }
        }
        Ok(())
    }

    fn land(&mut self, thread: usize, copy: &Copy) -> Result<()> {
        let mut bytes = [0; 16];
        self.global
            .borrow_mut()
            .read(copy.from, &mut bytes[..copy.size], false)?;
        let writer = Writer::Thread {
            number: thread,
            turn: self.shared.turn,
            fences: self.threads[thread].proxy_fences,
        };
        for (index, word) in bytes.chunks_exact(4).enumerate() {
            let value = u32::from_le_bytes(word.try_into().unwrap());
            self.shared.land(copy.to + index, value, writer);
        }
        Ok(())
    }
}
