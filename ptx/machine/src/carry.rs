//! Integer arithmetic of more than a register: sums, differences and products that leave a carry for the next instruction.

use super::{
    Result,
    block::Block,
    decode::{Operands, Value},
    parse::Register,
};

pub(super) struct Operation {
    to: Register,
    from: Vec<Value>,
    kind: Kind,
    bits: u32,
    /// Whether it adds the carry, and whether it leaves one.
    takes: bool,
    gives: bool,
}

#[derive(Clone, Copy)]
enum Kind {
    Add,
    Subtract,
    MultiplyLow,
    MultiplyHigh,
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Operation> {
    let words: Vec<&str> = opcode.split('.').collect();
    let (name, takes) = match words[0] {
        "addc" | "subc" | "madc" => (&words[0][..3], true),
        name => (name, false),
    };
    let (kind, rest) = match (name, &words[1..]) {
        ("add", rest) => (Kind::Add, rest),
        ("sub", rest) => (Kind::Subtract, rest),
        ("mad", ["lo", rest @ ..]) => (Kind::MultiplyLow, rest),
        ("mad", ["hi", rest @ ..]) => (Kind::MultiplyHigh, rest),
        _ => return None,
    };
    let (gives, bits) = match rest {
        ["cc", bits] => (true, *bits),
        [bits] => (false, *bits),
        _ => return None,
    };
    let bits = match bits {
        "u32" | "s32" => 32,
        "u64" | "s64" => 64,
        _ => return None,
    };
    let count = operands.count();
    // Upper halves of signed products differ.
    let known = (takes || gives) && (opcode.ends_with(|c: char| c.is_numeric()));
    let signed = matches!(kind, Kind::MultiplyHigh) && words.last()?.starts_with('s');
    (known && !signed).then(|| Operation {
        to: operands.register(0),
        from: (1..count).map(|index| operands.value(index)).collect(),
        kind,
        bits,
        takes,
        gives,
    })
}

impl Block<'_> {
    pub(super) fn carry(&mut self, thread: usize, operation: &Operation) -> Result<()> {
        let mask = u64::MAX >> (64 - operation.bits);
        let mut values = [0u128; 3];
        for (to, value) in values.iter_mut().zip(&operation.from) {
            *to = u128::from(self.value(thread, *value)? & mask);
        }
        let carry = match operation.takes {
            true => {
                let carry = self.threads[thread].carry;
                u128::from(carry.ok_or("a carry is taken that nothing left")?)
            }
            false => 0,
        };
        let [a, b, c] = values;
        let mask = u128::from(mask);
        // Below zero, all upper bits are set.
        let result = match operation.kind {
            Kind::Add => a + b + carry,
            Kind::Subtract => a.wrapping_sub(b).wrapping_sub(carry),
            Kind::MultiplyLow => ((a * b) & mask) + c + carry,
            Kind::MultiplyHigh => ((a * b) >> operation.bits) + c + carry,
        };
        if operation.gives {
            self.threads[thread].carry = Some(result & !mask != 0);
        }
        self.threads[thread].set(operation.to, (result & mask) as u64)
    }
}
