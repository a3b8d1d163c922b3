//! Atomic instructions: `atom`, which returns what was there, and `red`.

use super::{
    Result,
    access::Author,
    block::{Block, WARP},
    decode::{Function, Operands, Place, Value},
    float, integer,
    parse::Register,
    transfer::{Space, found, is_about_caches},
};

pub(super) struct Atomic {
    pub(super) space: Space,
    pub(super) bytes: usize,
    place: Place,
    /// The elements: where the old value goes, and what the new one is made of.
    elements: Vec<(Option<Register>, Value)>,
    /// The third operand, of `cas`.
    swapped: Option<Value>,
    /// The new value, of the old one and the operands.
    change: Function,
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Atomic> {
    let mut words = opcode.split('.');
    let returns = match words.next()? {
        "atom" => true,
        "red" => false,
        _ => return None,
    };
    let (mut space, mut name) = (Space::Generic, None);
    let mut kind = None;
    for word in words {
        match word {
            _ if is_about_caches(word) || ["noftz", "v2", "v4", "v8"].contains(&word) => {}
            _ => match Space::named(word) {
                Some(known) => space = known,
                None if name.is_none() => name = Some(word),
                None => kind = Some(word),
            },
        }
    }
    let (name, kind) = (name?, kind?);
    let change: Function = match name {
        "exch" => Box::new(|x| Some(x[1])),
        "cas" => Box::new(|x| Some(if x[0] == x[1] { x[2] } else { x[0] })),
        _ => {
            let opcode = format!("{name}.{kind}");
            let function = integer::function(&opcode).or_else(|| float::function(&opcode));
            function.filter(|(count, _)| *count == 2)?.1
        }
    };
    let bits: usize = match kind.strip_suffix("x2") {
        Some(_) => 32,
        None => kind.trim_start_matches(char::is_alphabetic).parse().ok()?,
    };
    let first = usize::from(returns);
    let values = operands.values(first + 1);
    let old = match returns {
        true => operands.sinks(0),
        false => vec![None; values.len()],
    };
    Some(Atomic {
        space,
        bytes: bits / 8,
        place: operands.place(first),
        elements: old.into_iter().zip(values).collect(),
        swapped: (name == "cas").then(|| operands.value(first + 2)),
        change,
    })
}

impl Block<'_> {
    pub(super) fn atomic(&mut self, thread: usize, atomic: &Atomic) -> Result<()> {
        let address = self.address(thread, &atomic.place)?;
        let (space, address) = found(atomic.space, address);
        let bytes = atomic.bytes;
        if !address.is_multiple_of((bytes * atomic.elements.len()) as u64) {
            return Err(format!("{address:#x} is not aligned"));
        }
        let swapped = match atomic.swapped {
            Some(value) => self.value(thread, value)?,
            None => 0,
        };
        for (index, (to, value)) in atomic.elements.iter().enumerate() {
            let at = address + (index * bytes) as u64;
            let value = self.value(thread, *value)?;
            let change = |old| (atomic.change)(&[old, value, swapped, 0]);
            let old = match space {
                Space::Global => {
                    let old = self.load_from(thread, space, at, bytes)?;
                    let new = change(old).ok_or("the result is undefined")?;
                    self.store_to(thread, space, at, bytes, new)?;
                    old
                }
                Space::Shared => {
                    let fences = self.threads[thread].proxy_fences;
                    let author = Author {
                        thread,
                        warp: self.first_warp + thread / WARP,
                        heard: &self.threads[thread].heard,
                    };
                    self.shared.change(at, bytes, &author, fences, change)?
                }
                _ => return Err("an atomic in neither global nor shared memory".into()),
            };
            if let Some(to) = to {
                self.threads[thread].set(*to, old)?;
            }
        }
        Ok(())
    }
}
