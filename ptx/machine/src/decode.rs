//! Translates statements to operations. Anything unknown panics with the line.

use super::{
    Kernel, Parameter, atomic, barrier, carry, cluster, convert, copy, float, integer, ldmatrix,
    mma,
    parse::{Entry, Operand, Register, Statement},
    thread::{MODULE_WINDOW, SHARED_BASE},
    tma, transfer, warp, wgmma, wmma,
};

/// The function that an instruction computes; `None` if the result is undefined.
pub(super) type Function = Box<dyn Fn(&[u64; 4]) -> Option<u64> + Send + Sync>;

pub(super) struct Instruction {
    /// The predicate, and whether the instruction runs if it is false instead of true.
    pub(super) guard: Option<(Register, bool)>,
    pub(super) operation: Operation,
    pub(super) text: String,
}

/// An operand that is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    Register(Register),
    /// What a predicate is not.
    Negated(Register),
    Immediate(u64),
    Special(Special),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Special {
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
    Lane,
    /// The lanes before this one, as bits.
    LanesBelow,
    Warp,
    WarpSize,
    Timer,
}

/// An address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) base: Value,
    pub(super) offset: i64,
}

pub(super) enum Operation {
    Compute {
        function: Function,
        to: Register,
        from: Vec<Value>,
    },
    /// Packs registers of `bits` bits side by side, the first lowest.
    Pack {
        to: Register,
        from: Vec<Value>,
        bits: usize,
    },
    Unpack {
        to: Vec<Option<Register>>,
        from: Value,
        bits: usize,
    },
    Branch(usize),
    Exit,
    Sleep,
    /// `bar.sync`.
    Barrier {
        number: Value,
        /// How many threads it waits for, or all.
        count: Option<Value>,
    },
    /// Blocks run one after the other, and threads of a block see global memory as the last one wrote it.
    MemoryFence,
    ActiveMask(Register),
    Carry(carry::Operation),
    Atomic(atomic::Atomic),
    Transfer(transfer::Transfer),
    Copy(copy::Operation),
    Mbarrier(barrier::Operation),
    Cluster(cluster::Operation),
    Tma(tma::Load),
    /// `fence.proxy.async`.
    ProxyFence,
    /// A warp or a warpgroup runs it together.
    Mma(mma::Mma),
    Wgmma(wgmma::Operation),
    Wmma(wmma::Operation),
    Ldmatrix(ldmatrix::Operation),
    /// Some threads of a warp run it together.
    Warp(warp::Operation),
}

pub(super) fn kernel(entry: Entry) -> Kernel {
    let mut parameters: Vec<Parameter> = Vec::new();
    for (name, align, size) in &entry.parameters {
        let end = parameters.last().map_or(0, |last| last.offset + last.size);
        parameters.push(Parameter {
            name: name.clone(),
            offset: end.next_multiple_of(*align),
            size: *size,
            is_tensor_map: *align >= 64,
        });
    }
    let mut static_shared = 0usize;
    let mut names: Vec<(&str, u64)> = parameters
        .iter()
        .map(|parameter| (&*parameter.name, parameter.offset as u64))
        .collect();
    // Dynamic shared memory, which has no size, comes after the rest.
    let (dynamic, fixed): (Vec<_>, Vec<_>) = entry.shared.iter().partition(|shared| shared.2 == 0);
    for (name, align, size) in fixed.into_iter().chain(dynamic) {
        static_shared = static_shared.next_multiple_of(*align);
        names.push((name, SHARED_BASE + static_shared as u64));
        static_shared += size;
    }
    let mut local = 0usize;
    for (name, align, size) in &entry.local {
        local = local.next_multiple_of(*align);
        names.push((name, local as u64));
        local += size;
    }
    let mut data = Vec::new();
    for (name, align, bytes) in &entry.data {
        data.resize(data.len().next_multiple_of(*align), 0);
        names.push((name, MODULE_WINDOW + data.len() as u64));
        data.extend(bytes);
    }
    let context = Context {
        names: &names,
        entry: &entry,
    };
    let instructions = entry.statements.iter().map(|statement| Instruction {
        guard: statement.guard,
        operation: Operands { statement, context }.operation(),
        text: statement.text.clone(),
    });
    let instructions: Vec<Instruction> = instructions.collect();
    Kernel {
        grain: grain(&instructions),
        local,
        data,
        instructions,
        registers: entry.registers,
        static_shared,
        most_threads: entry.most_threads,
        cluster: entry.cluster.unwrap_or([1; 3]),
        name: entry.name,
        parameters,
    }
}

/// The smallest piece of what may be shared memory that instructions read or write: 4 bytes, or less.
fn grain(instructions: &[Instruction]) -> usize {
    let size = |instruction: &Instruction| match &instruction.operation {
        Operation::Transfer(transfer) => (transfer.space, transfer.bytes),
        Operation::Atomic(atomic) => (atomic.space, atomic.bytes),
        Operation::Ldmatrix(_) | Operation::Wmma(_) => (transfer::Space::Shared, 2),
        _ => (transfer::Space::Global, 4),
    };
    let pieces = instructions.iter().map(size);
    let shared = pieces
        .filter(|(space, _)| matches!(space, transfer::Space::Shared | transfer::Space::Generic));
    shared.map(|(_, bytes)| bytes).fold(4, usize::min)
}

#[derive(Clone, Copy)]
struct Context<'a> {
    names: &'a [(&'a str, u64)],
    entry: &'a Entry,
}

/// The operands of a statement, in the forms that operations take.
pub(super) struct Operands<'a> {
    statement: &'a Statement,
    context: Context<'a>,
}

impl Operands<'_> {
    fn operation(&self) -> Operation {
        let opcode = &*self.statement.opcode;
        match opcode {
            "ret" => return Operation::Exit,
            "bra" | "bra.uni" => return Operation::Branch(self.label(0)),
            "nanosleep.u32" => return Operation::Sleep,
            "bar.sync" | "barrier.sync" | "barrier.sync.aligned" => {
                let count = (self.count() == 2).then(|| self.value(1));
                let number = self.value(0);
                return Operation::Barrier { number, count };
            }
            "activemask.b32" => return Operation::ActiveMask(self.register(0)),
            "membar.cta" | "membar.gl" | "membar.sys" => return Operation::MemoryFence,
            _ if opcode.starts_with("fence.")
                && !opcode.contains("proxy")
                && !opcode.contains("mbarrier") =>
            {
                return Operation::MemoryFence;
            }
            "fence.proxy.async.shared::cta" | "fence.proxy.async" => return Operation::ProxyFence,
            _ => {}
        }
        if let Some(kind) = opcode.strip_prefix("mov.") {
            return self.mov(kind);
        }
        let function = integer::function(opcode)
            .or_else(|| float::function(opcode))
            .or_else(|| convert::function(opcode))
            .or_else(|| cluster::function(opcode));
        if let Some((arguments, function)) = function {
            assert_eq!(self.count(), arguments + 1, "operands: {}", self.text());
            return Operation::Compute {
                function,
                to: self.register(0),
                from: (1..=arguments).map(|index| self.value(index)).collect(),
            };
        }
        transfer::decode(opcode, self)
            .map(Operation::Transfer)
            .or_else(|| carry::decode(opcode, self).map(Operation::Carry))
            .or_else(|| atomic::decode(opcode, self).map(Operation::Atomic))
            .or_else(|| copy::decode(opcode, self).map(Operation::Copy))
            .or_else(|| barrier::decode(opcode, self).map(Operation::Mbarrier))
            .or_else(|| cluster::decode(opcode, self).map(Operation::Cluster))
            .or_else(|| tma::decode(opcode, self).map(Operation::Tma))
            .or_else(|| mma::decode(opcode, self).map(Operation::Mma))
            .or_else(|| wgmma::decode(opcode, self).map(Operation::Wgmma))
            .or_else(|| wmma::decode(opcode, self).map(Operation::Wmma))
            .or_else(|| ldmatrix::decode(opcode, self).map(Operation::Ldmatrix))
            .or_else(|| warp::decode(opcode, self).map(Operation::Warp))
            .unwrap_or_else(|| panic!("not known: {}", self.text()))
    }

    fn mov(&self, kind: &str) -> Operation {
        let bits: usize = match kind {
            "pred" => 1,
            _ => kind[1..]
                .parse()
                .unwrap_or_else(|_| panic!("not known: {}", self.text())),
        };
        let operands = &self.statement.operands;
        match (&operands[0], &operands[1]) {
            (Operand::Vector(to), _) => Operation::Unpack {
                bits: bits / to.len(),
                to: self.sinks(0),
                from: self.value(1),
            },
            (_, Operand::Vector(from)) => Operation::Pack {
                bits: bits / from.len(),
                to: self.register(0),
                from: self.values(1),
            },
            _ => Operation::Pack {
                bits,
                to: self.register(0),
                from: vec![self.value(1)],
            },
        }
    }

    pub(super) fn text(&self) -> &str {
        &self.statement.text
    }

    pub(super) fn count(&self) -> usize {
        self.statement.operands.len()
    }

    fn get(&self, index: usize) -> &Operand {
        let operand = self.statement.operands.get(index);
        operand.unwrap_or_else(|| panic!("an operand is missing: {}", self.text()))
    }

    fn label(&self, index: usize) -> usize {
        match self.get(index) {
            Operand::Name(name) => self.context.entry.labels[name],
            _ => panic!("no label: {}", self.text()),
        }
    }

    pub(super) fn register(&self, index: usize) -> Register {
        match self.get(index) {
            Operand::Register(register) => *register,
            _ => panic!("no register: {}", self.text()),
        }
    }

    pub(super) fn constant(&self, index: usize) -> u64 {
        match self.get(index) {
            Operand::Immediate(value) => *value,
            _ => panic!("no constant: {}", self.text()),
        }
    }

    pub(super) fn value(&self, index: usize) -> Value {
        self.value_of(self.get(index))
    }

    /// The elements of a vector, or a single operand.
    pub(super) fn values(&self, index: usize) -> Vec<Value> {
        match self.get(index) {
            Operand::Vector(operands) => operands.iter().map(|one| self.value_of(one)).collect(),
            operand => vec![self.value_of(operand)],
        }
    }

    pub(super) fn registers(&self, index: usize) -> Vec<Register> {
        let register = |value| match value {
            Value::Register(register) => register,
            _ => panic!("no registers: {}", self.text()),
        };
        self.values(index).into_iter().map(register).collect()
    }

    /// Registers that are written, `None` where the result is dropped.
    pub(super) fn sinks(&self, index: usize) -> Vec<Option<Register>> {
        let of = |operand: &Operand| match operand {
            Operand::Register(register) => Some(*register),
            Operand::Name(name) if name == "_" => None,
            _ => panic!("no registers: {}", self.text()),
        };
        match self.get(index) {
            Operand::Vector(operands) => operands.iter().map(of).collect(),
            operand => vec![of(operand)],
        }
    }

    /// `result|predicate`, of which the second may be missing.
    pub(super) fn pair(&self, index: usize) -> (Option<Register>, Option<Register>) {
        let found = self.sinks(index);
        (found[0], found.get(1).copied().flatten())
    }

    pub(super) fn place(&self, index: usize) -> Place {
        let (place, coordinates) = self.tensor(index);
        assert!(coordinates.is_empty(), "no address: {}", self.text());
        place
    }

    /// The address of a tensor map, and the coordinates.
    pub(super) fn tensor(&self, index: usize) -> (Place, Vec<Value>) {
        match self.get(index) {
            Operand::Address(base, offset, coordinates) => (
                Place {
                    base: self.value_of(base),
                    offset: *offset,
                },
                coordinates.iter().map(|one| self.value_of(one)).collect(),
            ),
            _ => panic!("no address: {}", self.text()),
        }
    }

    fn value_of(&self, operand: &Operand) -> Value {
        match operand {
            Operand::Register(register) => Value::Register(*register),
            Operand::Not(register) => Value::Negated(*register),
            Operand::Immediate(value) => Value::Immediate(*value),
            Operand::Name(name) => special(name)
                .map(Value::Special)
                .or_else(|| {
                    let known = self.context.names.iter().find(|known| known.0 == name);
                    known.map(|known| Value::Immediate(known.1))
                })
                .unwrap_or_else(|| panic!("{name} is not known: {}", self.text())),
            _ => panic!("no value: {}", self.text()),
        }
    }
}

fn special(name: &str) -> Option<Special> {
    if name == "WARP_SZ" {
        return Some(Special::WarpSize);
    }
    let axis = |name: &str| ["x", "y", "z"].iter().position(|axis| *axis == name);
    match name.strip_prefix('%')?.split_once('.') {
        Some(("tid", name)) => axis(name).map(Special::Thread),
        Some(("ntid", name)) => axis(name).map(Special::Threads),
        Some(("ctaid", name)) => axis(name).map(Special::Block),
        Some(("nctaid", name)) => axis(name).map(Special::Blocks),
        None if name == "%laneid" => Some(Special::Lane),
        None if name == "%lanemask_lt" => Some(Special::LanesBelow),
        None if name == "%warpid" => Some(Special::Warp),
        None if name == "%globaltimer" => Some(Special::Timer),
        _ => None,
    }
}
