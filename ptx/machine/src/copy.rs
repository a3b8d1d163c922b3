//! `cp.async`: copies of up to 16 bytes from global to shared memory, which arrive when a thread waits for their group, or for the
//! barrier that they were handed to.

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
    /// Has the thread arrive at a barrier when all its copies have. The barrier waits for one arrival more, or has been told of it.
    Arrive {
        barrier: Place,
        more: bool,
    },
}

/// The copies of a thread: committed groups, and copies that are not in a group yet.
#[derive(Debug, Default)]
pub(super) struct Copies {
    groups: Vec<Vec<Copy>>,
    open: Vec<Copy>,
}

/// The copies that barriers wait for, each with the barrier and the thread.
#[derive(Debug, Default)]
pub(super) struct Handed(Vec<(u64, usize, Vec<Copy>)>);

impl Handed {
    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }
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
        "cp.async.mbarrier.arrive.shared.b64" | "cp.async.mbarrier.arrive.shared::cta.b64" => {
            let barrier = operands.place(0);
            Operation::Arrive {
                barrier,
                more: true,
            }
        }
        "cp.async.mbarrier.arrive.noinc.shared.b64"
        | "cp.async.mbarrier.arrive.noinc.shared::cta.b64" => {
            let (barrier, more) = (operands.place(0), false);
            Operation::Arrive { barrier, more }
        }
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
            Operation::Arrive { barrier, more } => {
                let barrier = self.address(thread, barrier)?;
                self.expect_copies(barrier, thread, *more)?;
                let Copies { groups, open } = std::mem::take(&mut self.threads[thread].copies);
                let all = groups.into_iter().flatten().chain(open).collect();
                self.handed.0.push((barrier, thread, all));
            }
        }
        Ok(())
    }

    /// Delivers what one of the threads has handed to a barrier: the last one, because no order is promised.
    pub(super) fn land_one(&mut self, barrier: u64) -> Result<()> {
        let handed = &mut self.handed.0;
        let Some(index) = handed.iter().rposition(|(for_, ..)| *for_ == barrier) else {
            return Ok(());
        };
        let (_, thread, copies) = handed.remove(index);
        for copy in &copies {
            self.land(thread, copy)?;
        }
        self.complete_copies(barrier, thread)
    }

    fn land(&mut self, thread: usize, copy: &Copy) -> Result<()> {
        let mut bytes = [0; 16];
        // A copy of nothing but zeros may name any address.
        if copy.size > 0 {
            let bytes = &mut bytes[..copy.size];
            self.global.borrow_mut().read(copy.from, bytes, false)?;
        }
        let fences = self.threads[thread].proxy_fences;
        let writer = Writer::Thread(self.shared.written(thread, fences));
        self.shared.land(copy.to, &bytes[..copy.bytes], writer)
    }
}
