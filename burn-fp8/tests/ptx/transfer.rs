//! Loads, stores and atomics.

use super::{
    Result,
    block::{Block, WARP},
    convert::within,
    decode::{Operands, Place, Value},
    parse::Register,
    shared::{Author, Observer, Reader},
    thread::{PARAMETER_WINDOW, SHARED_WINDOW},
};

pub(super) struct Transfer {
    space: Space,
    /// The size of one element.
    bytes: usize,
    signed: bool,
    /// Whether it reads through the cache for memory that no launch writes.
    constant: bool,
    place: Place,
    kind: Kind,
}

enum Kind {
    Load(Vec<Register>),
    Store(Vec<Value>),
    /// The old value goes to a register.
    Atomic(Register, fn(u32, u32) -> u32, Value),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    Parameter,
    Global,
    Shared,
    Generic,
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Transfer> {
    let mut words = opcode.split('.');
    let name = words.next()?;
    if !["ld", "st", "atom"].contains(&name) {
        return None;
    }
    let mut transfer = Transfer {
        space: Space::Generic,
        bytes: 0,
        signed: false,
        constant: false,
        place: operands.place(usize::from(name != "st")),
        kind: match name {
            "ld" => Kind::Load(operands.registers(0)),
            "st" => Kind::Store(operands.values(1)),
            _ => Kind::Atomic(operands.register(0), u32::max, operands.value(2)),
        },
    };
    let mut elements = 1;
    for word in words {
        match word {
            "param" => transfer.space = Space::Parameter,
            "global" => transfer.space = Space::Global,
            "shared" => transfer.space = Space::Shared,
            "nc" if name == "ld" => transfer.constant = true,
            "volatile" | "relaxed" | "gpu" => {}
            "v2" => elements = 2,
            "v4" => elements = 4,
            "max" if name == "atom" && opcode.ends_with(".u32") => {}
            _ => {
                let bits = word
                    .strip_prefix(['u', 's', 'b', 'f'])?
                    .parse::<usize>()
                    .ok()?;
                transfer.bytes = bits / 8;
                transfer.signed = word.starts_with('s');
            }
        }
    }
    let found = match &transfer.kind {
        Kind::Load(to) => to.len(),
        Kind::Store(from) => from.len(),
        Kind::Atomic(..) => 1,
    };
    assert_eq!(found, elements, "{}", operands.text());
    Some(transfer)
}

impl Block<'_> {
    pub(super) fn transfer(&mut self, thread: usize, transfer: &Transfer) -> Result<()> {
        let address = self.address(thread, &transfer.place)?;
        let (space, address) = match transfer.space {
            Space::Generic => {
                if let Some(offset) = within(SHARED_WINDOW, address) {
                    (Space::Shared, offset)
                } else if let Some(offset) = within(PARAMETER_WINDOW, address) {
                    (Space::Parameter, offset)
                } else {
                    (Space::Global, address)
                }
            }
            space => (space, address),
        };
        let bytes = transfer.bytes;
        let count = match &transfer.kind {
            Kind::Load(to) => to.len(),
            Kind::Store(from) => from.len(),
            Kind::Atomic(..) => 1,
        };
        if !address.is_multiple_of((bytes * count) as u64) {
            return Err(format!("{address:#x} is not aligned"));
        }
        match &transfer.kind {
            Kind::Load(to) => {
                for (index, register) in to.iter().enumerate() {
                    let at = address + (index * bytes) as u64;
                    let mut value = self.load(thread, space, at, bytes, transfer.constant)?;
                    if transfer.signed && bytes < 4 {
                        let unused = 64 - 8 * bytes;
                        value = ((value << unused) as i64 >> unused) as u64 & 0xFFFF_FFFF;
                    }
                    self.threads[thread].set(*register, value)?;
                }
            }
            Kind::Store(from) => {
                for (index, value) in from.iter().enumerate() {
                    let value = self.value(thread, *value)?;
                    self.store(
                        thread,
                        space,
                        address + (index * bytes) as u64,
                        bytes,
                        value,
                    )?;
                }
            }
            Kind::Atomic(to, function, value) => {
                if space != Space::Global {
                    return Err("an atomic that is not in global memory".into());
                }
                let value = self.value(thread, *value)? as u32;
                let old = self.load(thread, space, address, bytes, false)? as u32;
                self.store(
                    thread,
                    space,
                    address,
                    bytes,
                    u64::from(function(old, value)),
                )?;
                self.threads[thread].set(*to, u64::from(old))?;
            }
        }
        Ok(())
    }

    fn load(
        &mut self,
        thread: usize,
        space: Space,
        address: u64,
        bytes: usize,
        constant: bool,
    ) -> Result<u64> {
        let mut value = [0; 8];
        match space {
            Space::Parameter => {
                let start = address as usize;
                let from = self.parameters.get(start..start + bytes);
                value[..bytes].copy_from_slice(from.ok_or("there is no such parameter")?);
            }
            Space::Global => {
                self.global
                    .borrow_mut()
                    .read(address, &mut value[..bytes], constant)?
            }
            _ => {
                let words = whole_words(bytes)?;
                let index = self.shared.index(address, words)?;
                let seen = &self.threads[thread].seen;
                let observer = Observer {
                    reader: Reader::Thread(thread),
                    seen: &|barrier| seen.get(&barrier).copied(),
                    fences: None,
                };
                for word in 0..words {
                    let read = self.shared.read(index + word, &observer)?;
                    value[4 * word..][..4].copy_from_slice(&read.to_le_bytes());
                }
            }
        }
        Ok(u64::from_le_bytes(value))
    }

    fn store(
        &mut self,
        thread: usize,
        space: Space,
        address: u64,
        bytes: usize,
        value: u64,
    ) -> Result<()> {
        match space {
            Space::Parameter => Err("a parameter is written".into()),
            Space::Global => self
                .global
                .borrow_mut()
                .write(address, &value.to_le_bytes()[..bytes]),
            _ => {
                let words = whole_words(bytes)?;
                let index = self.shared.index(address, words)?;
                let fences = self.threads[thread].proxy_fences;
                let heard = &self.threads[thread].heard;
                let author = Author {
                    thread,
                    warp: self.first_warp + thread / WARP,
                    heard,
                };
                for word in 0..words {
                    let value = (value >> (32 * word)) as u32;
                    self.shared.write(index + word, value, &author, fences)?;
                }
                Ok(())
            }
        }
    }
}

fn whole_words(bytes: usize) -> Result<usize> {
    match bytes {
        4 | 8 => Ok(bytes / 4),
        _ => Err("shared memory is read and written by words here".into()),
    }
}
