//! `wgmma` for fp8: 64 rows, N columns and 32 terms, spread over the 128 threads of a warpgroup, with both operands in shared
//! memory.

use std::{collections::HashMap, ops::Range};

use super::{
    Result,
    access::{Heard, Observer, Reader},
    block::{Block, WARP},
    decode::{Operands, Value},
    fp8::Fp8,
    parse::Register,
    thread::{SHARED_BASE, Thread},
    tma::swizzled,
};

pub(super) enum Operation {
    Fence,
    Multiply(Multiply),
    Commit,
    /// Waits until no more than this number of groups is in flight.
    Wait(usize),
}

pub(super) struct Multiply {
    sums: Vec<Register>,
    left: Value,
    right: Value,
    /// Whether the result is added to the accumulators or overwrites them.
    add: Value,
    formats: [Fp8; 2],
}

/// The instructions in flight of each warpgroup, by its first thread.
#[derive(Debug, Default)]
pub(super) struct Warpgroups(HashMap<usize, Flight>);

/// The instructions in flight of a warpgroup.
#[derive(Debug, Default)]
struct Flight {
    groups: Vec<Group>,
    open: Group,
}

#[derive(Debug, Default)]
struct Group {
    registers: Vec<Register>,
    words: Vec<u64>,
}

impl Warpgroups {
    pub(super) fn any(&self) -> bool {
        let used = |group: &Group| !group.registers.is_empty();
        let mut flights = self.0.values();
        flights.any(|flight| flight.groups.iter().any(used) || used(&flight.open))
    }
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Operation> {
    Some(match opcode {
        "wgmma.fence.sync.aligned" => Operation::Fence,
        "wgmma.commit_group.sync.aligned" => Operation::Commit,
        "wgmma.wait_group.sync.aligned" => Operation::Wait(operands.constant(0) as usize),
        _ => {
            let shape = opcode.strip_prefix("wgmma.mma_async.sync.aligned.m64n")?;
            let (columns, formats) = shape.split_once("k32.f32.")?;
            let (left, right) = formats.split_once('.')?;
            let columns: usize = columns.parse().ok()?;
            let multiply = Multiply {
                sums: operands.registers(0),
                left: operands.value(1),
                right: operands.value(2),
                add: operands.value(3),
                formats: [Fp8::named(left)?, Fp8::named(right)?],
            };
            // Neither operand is negated. Fp8 operands have no option to be transposed.
            let scales = [operands.constant(4), operands.constant(5)];
            let count = (multiply.sums.len(), operands.count());
            assert_eq!(
                (count, scales),
                ((columns / 2, 6), [1, 1]),
                "{}",
                operands.text()
            );
            Operation::Multiply(multiply)
        }
    })
}

impl Block<'_> {
    pub(super) fn wgmma(&mut self, operation: &Operation, group: Range<usize>) -> Result<()> {
        match operation {
            Operation::Fence => self.threads[group]
                .iter_mut()
                .for_each(Thread::fence_registers),
            Operation::Multiply(multiply) => self.multiply(multiply, group)?,
            Operation::Commit => {
                let flight = self.warpgroups.0.entry(group.start).or_default();
                flight.groups.push(std::mem::take(&mut flight.open));
            }
            Operation::Wait(most) => {
                let flight = self.warpgroups.0.entry(group.start).or_default();
                let done = flight.groups.len().saturating_sub(*most);
                let done: Vec<Group> = flight.groups.drain(..done).collect();
                let rest = flight.groups.iter().chain([&flight.open]);
                let busy: Vec<Register> = rest.flat_map(|group| group.registers.clone()).collect();
                self.shared.time += 1;
                for finished in done {
                    for word in finished.words {
                        self.shared
                            .release(word, self.first_warp + group.start / WARP)?;
                    }
                    let landed = |register: &&Register| !busy.contains(register);
                    for register in finished.registers.iter().filter(landed) {
                        for thread in &mut self.threads[group.clone()] {
                            thread.land_accumulator(*register);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn multiply(&mut self, multiply: &Multiply, group: Range<usize>) -> Result<()> {
        let mut same = [0; 3];
        for thread in group.clone() {
            let values = [multiply.left, multiply.right, multiply.add];
            for (same, value) in same.iter_mut().zip(values) {
                let value = self.value(thread, value)?;
                if thread > group.start && value != *same {
                    return Err("threads of a warpgroup give wgmma different operands".into());
                }
                *same = value;
            }
        }
        let [left, right, add] = same;
        let columns = 2 * multiply.sums.len();
        let mut words = Vec::new();
        let left = self.matrix(left, 64, multiply.formats[0], &group, &mut words)?;
        let right = self.matrix(right, columns, multiply.formats[1], &group, &mut words)?;
        for thread in group.clone() {
            let number = thread - group.start;
            for (i, register) in multiply.sums.iter().enumerate() {
                // "Register Fragments" of wgmma.mma_async, accumulator D.
                let row = number / 32 * 16 + number % 32 / 4 + i / 2 % 2 * 8;
                let column = i / 4 * 8 + number % 4 * 2 + i % 2;
                let old = self.threads[thread].accumulator(*register, add != 0)?;
                let old = old.map_or(0.0, |bits| f64::from(f32::from_bits(bits as u32)));
                let terms = left[row].iter().zip(&right[column]).map(|(x, y)| x * y);
                let sum = (old + terms.sum::<f64>()) as f32;
                self.threads[thread].set_accumulator(*register, u64::from(sum.to_bits()));
            }
        }
        let open = &mut self.warpgroups.0.entry(group.start).or_default().open;
        open.registers.extend(&multiply.sums);
        open.words.extend(words);
        Ok(())
    }

    /// The rows, of 32 terms each, of the matrix that a descriptor describes: "Matrix Descriptor Format" and "Strides" of the PTX
    /// ISA, for operands whose terms are innermost, in the 128-byte swizzle.
    fn matrix(
        &mut self,
        descriptor: u64,
        rows: usize,
        format: Fp8,
        group: &Range<usize>,
        words: &mut Vec<u64>,
    ) -> Result<Vec<[f64; 32]>> {
        // Start and stride (from eight rows to the next eight) are in units of 16 bytes. The leading dimension's offset has no
        // meaning in this swizzle.
        let start = (descriptor & 0x3FFF) << 4;
        let stride = (descriptor >> 32 & 0x3FFF) << 4;
        let reserved = descriptor & 0x3FF1_C000_C000_C000;
        let (offset, swizzle) = (descriptor >> 49 & 7, descriptor >> 62);
        if reserved != 0 || offset != 0 || swizzle != 1 {
            return Err(format!(
                "descriptor {descriptor:#x}: reserved bits, an offset, or another swizzle"
            ));
        }
        // The pattern repeats every 1024 bytes, so without an offset it begins at a multiple of 1024.
        if !(start & !0x7F).is_multiple_of(1024) || !stride.is_multiple_of(1024) || stride == 0 {
            return Err(format!(
                "descriptor {descriptor:#x}: not in whole patterns of 1024 bytes"
            ));
        }
        if start < SHARED_BASE {
            return Err(format!("descriptor {descriptor:#x}: not in shared memory"));
        }
        let threads = &self.threads;
        // The phases that all threads have seen completed.
        let mut common = threads[group.start].seen.clone();
        for thread in &threads[group.clone()] {
            common.retain(|barrier, _| thread.seen.contains_key(barrier));
            for (barrier, phase) in &mut common {
                *phase = thread.seen[barrier].min(*phase);
            }
        }
        let seen = |barrier| common.get(&barrier).copied();
        let observer = Observer {
            reader: Reader::Several,
            heard: &Heard::new(),
            seen: &seen,
            fences: Some(&|thread| threads[thread].proxy_fences),
        };
        let values = format.values();
        let mut matrix = vec![[0.0; 32]; rows];
        for (row, terms) in matrix.iter_mut().enumerate() {
            let line = start + (row / 8) as u64 * stride + (row % 8) as u64 * 128;
            for word in 0..8 {
                let place = swizzled(line + 4 * word as u64);
                let mut codes = [0; 4];
                self.shared.read(place, &mut codes, &observer)?;
                self.shared.hold(place)?;
                words.push(place);
                for (byte, code) in codes.into_iter().enumerate() {
                    terms[4 * word + byte] = values[code as usize];
                }
            }
        }
        Ok(matrix)
    }
}
