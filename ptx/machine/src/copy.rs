//! `cp.async`: copies of up to 16 bytes from global to shared memory, which arrive when a thread waits for their group.

use super::{
    Result,
    access::{Author, Writer},
    block::{Block, WARP},
    decode::{Operands, Place, Value},
};

pub(super) enum Operation {
    /// Reads `size` bytes, and fills the rest of the `bytes` with zeros.
    Copy {
        to: Place,
        from: Place,
        bytes: usize,
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
    to: u64,
    from: u64,
    bytes: usize,
    size: usize,
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Operation> {
    Some(match opcode {
        "cp.async.cg.shared.global"
        | "cp.async.cg.shared::cta.global"
        | "cp.async.ca.shared.global"
        | "cp.async.ca.shared::cta.global" => {
            let bytes = operands.constant(2) as usize;
            let sizes: &[usize] = match opcode.contains(".cg.") {
                true => &[16],
                false => &[4, 8, 16],
            };
            assert!(sizes.contains(&bytes), "{}", operands.text());
            Operation::Copy {
                to: operands.place(0),
                from: operands.place(1),
                bytes,
                size: (operands.count() == 4).then(|| operands.value(3)),
            }
        }
        "cp.async.commit_group" => Operation::Commit,
        "cp.async.wait_all" => Operation::Wait(0),
        "cp.async.wait_group" => Operation::Wait(operands.constant(0) as usize),
        _ => return None,
    })
}

impl Block<'_> {
    pub(super) fn copy(&mut self, thread: usize, operation: &Operation) -> Result<()> {
        match operation {
            Operation::Copy {
                to,
                from,
                bytes,
                size,
            } => {
                let bytes = *bytes;
                let (to, from) = (self.address(thread, to)?, self.address(thread, from)?);
                let size = size.map_or(Ok(bytes as u64), |size| self.value(thread, size))?;
                if size > bytes as u64 || !(to | from).is_multiple_of(bytes as u64) {
                    return Err(format!("a copy of {size} bytes from {from:#x} to {to:#x}"));
                }
                let author = Author {
                    thread,
                    warp: self.first_warp + thread / WARP,
                    heard: &self.threads[thread].heard,
                };
                self.shared.announce(to, bytes, &author, false)?;
                let size = size as usize;
                self.threads[thread].copies.open.push(Copy {
                    to,
                    from,
                    bytes,
                    size,
                });
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
        let fences = self.threads[thread].proxy_fences;
        let writer = Writer::Thread(self.shared.written(thread, fences));
        self.shared.land(copy.to, &bytes[..copy.bytes], writer)
    }
}
