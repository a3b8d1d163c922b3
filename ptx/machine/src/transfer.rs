//! Loads and stores.

use super::{
    Result,
    access::{Author, Observer, Reader},
    block::{Block, WARP},
    convert::within,
    decode::{Operands, Place, Value},
    parse::Register,
    thread::{LOCAL_WINDOW, MODULE_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW},
};

pub(super) struct Transfer {
    pub(super) space: Space,
    /// The size of one element.
    pub(super) bytes: usize,
    signed: bool,
    /// Whether it reads through the cache for memory that no launch writes.
    constant: bool,
    place: Place,
    kind: Kind,
}

enum Kind {
    Load(Vec<Option<Register>>),
    Store(Vec<Value>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    Parameter,
    Global,
    Shared,
    Local,
    Generic,
}

impl Space {
    pub(super) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "param" => Self::Parameter,
            "global" => Self::Global,
            // In what a module declares as constant too.
            "const" => Self::Global,
            "shared" | "shared::cta" => Self::Shared,
            "local" => Self::Local,
            _ => return None,
        })
    }
}

/// Words that say how, and not what: caches and order, which memory here does not have.
pub(super) fn is_about_caches(word: &str) -> bool {
    let known = [
        "volatile", "weak", "relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys", "ca",
        "cg", "cs", "lu", "cv", "wb", "wt",
    ];
    known.contains(&word) || word.starts_with("L1::") || word.starts_with("L2::")
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Transfer> {
    let mut words = opcode.split('.');
    let name = words.next()?;
    if !["ld", "ldu", "st"].contains(&name) {
        return None;
    }
    let mut transfer = Transfer {
        space: Space::Generic,
        bytes: 0,
        signed: false,
        constant: false,
        place: operands.place(usize::from(name != "st")),
        kind: match name {
            "st" => Kind::Store(operands.values(1)),
            _ => Kind::Load(operands.sinks(0)),
        },
    };
    let mut elements = 1;
    for word in words {
        match word {
            "nc" if name == "ld" => transfer.constant = true,
            "v2" => elements = 2,
            "v4" => elements = 4,
            "v8" => elements = 8,
            _ if is_about_caches(word) => {}
            _ => match Space::named(word) {
                Some(space) => transfer.space = space,
                None => {
                    let bits = word
                        .strip_prefix(['u', 's', 'b', 'f'])?
                        .parse::<usize>()
                        .ok()?;
                    transfer.bytes = bits / 8;
                    transfer.signed = word.starts_with('s');
                }
            },
        }
    }
    let found = match &transfer.kind {
        Kind::Load(to) => to.len(),
        Kind::Store(from) => from.len(),
    };
    assert_eq!(found, elements, "{}", operands.text());
    Some(transfer)
}

impl Block<'_> {
    pub(super) fn transfer(&mut self, thread: usize, transfer: &Transfer) -> Result<()> {
        let address = self.address(thread, &transfer.place)?;
        let (space, address) = found(transfer.space, address);
        let bytes = transfer.bytes;
        let count = match &transfer.kind {
            Kind::Load(to) => to.len(),
            Kind::Store(from) => from.len(),
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
                    if let Some(register) = register {
                        self.threads[thread].set(*register, value)?;
                    }
                }
            }
            Kind::Store(from) => {
                for (index, value) in from.iter().enumerate() {
                    let value = self.value(thread, *value)?;
                    let at = address + (index * bytes) as u64;
                    self.store(thread, space, at, bytes, value)?;
                }
            }
        }
        Ok(())
    }

    /// Reads an element in any space.
    pub(super) fn load_from(
        &mut self,
        thread: usize,
        space: Space,
        address: u64,
        bytes: usize,
    ) -> Result<u64> {
        let (space, address) = found(space, address);
        self.load(thread, space, address, bytes, false)
    }

    /// Writes an element in any space.
    pub(super) fn store_to(
        &mut self,
        thread: usize,
        space: Space,
        address: u64,
        bytes: usize,
        value: u64,
    ) -> Result<()> {
        let (space, address) = found(space, address);
        self.store(thread, space, address, bytes, value)
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
        let to = &mut value[..bytes];
        match space {
            Space::Parameter => {
                let start = address as usize;
                let from = self.parameters.get(start..start + bytes);
                to.copy_from_slice(from.ok_or("there is no such parameter")?);
            }
            Space::Local => self.threads[thread].read_local(address, to)?,
            Space::Global => match within(MODULE_WINDOW, address) {
                Some(start) => {
                    let start = start as usize;
                    let from = self.kernel.data.get(start..start + bytes);
                    to.copy_from_slice(from.ok_or("there is no such data in the module")?);
                }
                None => self.global.borrow_mut().read(address, to, constant)?,
            },
            Space::Shared | Space::Generic => return self.load_shared(thread, address, bytes),
        }
        Ok(u64::from_le_bytes(value))
    }

    pub(super) fn load_shared(&mut self, thread: usize, address: u64, bytes: usize) -> Result<u64> {
        let (seen, heard) = (&self.threads[thread].seen, &self.threads[thread].heard);
        let observer = Observer {
            reader: Reader::Thread(thread),
            heard,
            seen: &|barrier| seen.get(&barrier).copied(),
            fences: None,
        };
        let mut value = [0; 8];
        self.shared.read(address, &mut value[..bytes], &observer)?;
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
        let from = &value.to_le_bytes()[..bytes];
        match space {
            Space::Parameter => Err("a parameter is written".into()),
            Space::Local => self.threads[thread].write_local(address, from),
            Space::Global => self.global.borrow_mut().write(address, from),
            Space::Shared | Space::Generic => self.store_shared(thread, address, bytes, value),
        }
    }

    pub(super) fn store_shared(
        &mut self,
        thread: usize,
        address: u64,
        bytes: usize,
        value: u64,
    ) -> Result<()> {
        let fences = self.threads[thread].proxy_fences;
        let author = Author {
            thread,
            warp: self.first_warp + thread / WARP,
            heard: &self.threads[thread].heard,
        };
        let from = &value.to_le_bytes()[..bytes];
        self.shared.write(address, from, &author, fences)
    }
}

/// The space of a generic address, and the address there.
pub(super) fn found(space: Space, address: u64) -> (Space, u64) {
    if space != Space::Generic {
        return (space, address);
    }
    let windows = [
        (SHARED_WINDOW, Space::Shared),
        (PARAMETER_WINDOW, Space::Parameter),
        (LOCAL_WINDOW, Space::Local),
    ];
    let known = windows
        .into_iter()
        .find_map(|(window, space)| Some((space, within(window, address)?)));
    known.unwrap_or((Space::Global, address))
}
