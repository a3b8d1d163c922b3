//! A thread: its registers, and what it has waited for.

use std::collections::HashMap;

use super::{Result, access::Heard, cluster::Arrival, copy::Copies, parse::Register};

/// The start of shared memory in its own space. It is not zero, because the beginning is reserved for the system.
pub(super) const SHARED_BASE: u64 = 1024;
/// The size of a window of generic addresses, in bytes.
pub(super) const WINDOW: u64 = 1 << 24;
/// Data of the module, which begin here in global memory.
pub(super) const MODULE_WINDOW: u64 = 0x7C00_0000_0000_0000;
/// The generic addresses of a thread's local memory start here.
pub(super) const LOCAL_WINDOW: u64 = 0x7D00_0000_0000_0000;
/// The generic addresses of the parameters start here.
pub(super) const PARAMETER_WINDOW: u64 = 0x7E00_0000_0000_0000;
/// The generic addresses of shared memory start here.
pub(super) const SHARED_WINDOW: u64 = 0x7F00_0000_0000_0000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Running,
    /// At a barrier of the block, which waits for this many threads, or for all.
    AtBarrier {
        number: u32,
        count: Option<u32>,
    },
    /// Waits for all threads of the cluster.
    AtCluster,
    /// Waits at an instruction that other threads have to reach too.
    Together,
    Exited,
}

/// The state of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Unwritten,
    Written,
    /// An asynchronous instruction is writing it.
    InFlight,
}

#[derive(Debug)]
pub(super) struct Thread {
    pub(super) place: [u32; 3],
    /// The index of the next instruction.
    pub(super) next: usize,
    pub(super) state: State,
    pub(super) copies: Copies,
    /// The number of `fence.proxy.async` that it ran.
    pub(super) proxy_fences: u32,
    /// The number of `fence.mbarrier_init` that it ran.
    pub(super) barrier_fences: u32,
    /// Whether it has arrived at the barrier of the cluster without having waited there, and whether that orders its memory.
    pub(super) arrived: Option<Arrival>,
    /// The number of `wgmma.fence` that it ran.
    register_fences: u32,
    /// For barriers in shared memory, the last phase that it has seen completed.
    pub(super) seen: HashMap<u64, u32>,
    pub(super) heard: Heard,
    /// The number of consecutive polls of a barrier that failed.
    pub(super) polls: u32,
    /// The carry that the last instruction with one has left.
    pub(super) carry: Option<bool>,
    /// Its local memory, and whether each byte was written.
    local: Vec<Option<u8>>,
    values: Vec<u64>,
    marks: Vec<Mark>,
    /// For each register, the value of `register_fences` at its last use.
    used: Vec<u32>,
}

impl Thread {
    pub(super) fn new(place: [u32; 3], registers: usize, local: usize) -> Self {
        Self {
            place,
            next: 0,
            state: State::Running,
            copies: Copies::default(),
            proxy_fences: 0,
            barrier_fences: 0,
            arrived: None,
            register_fences: 0,
            seen: HashMap::new(),
            heard: Heard::new(),
            polls: 0,
            carry: None,
            local: vec![None; local],
            values: vec![0; registers],
            marks: vec![Mark::Unwritten; registers],
            used: vec![0; registers],
        }
    }

    pub(super) fn get(&mut self, register: Register) -> Result<u64> {
        match self.marks[register] {
            Mark::Written => {
                self.used[register] = self.register_fences;
                Ok(self.values[register])
            }
            Mark::Unwritten => Err("a register is read that nothing wrote".into()),
            Mark::InFlight => Err("a register is read that wgmma still writes".into()),
        }
    }

    pub(super) fn set(&mut self, register: Register, value: u64) -> Result<()> {
        if self.marks[register] == Mark::InFlight {
            return Err("a register is written that wgmma still writes".into());
        }
        self.used[register] = self.register_fences;
        self.marks[register] = Mark::Written;
        self.values[register] = value;
        Ok(())
    }

    /// An instruction left the register undefined.
    pub(super) fn forget(&mut self, register: Register) {
        self.marks[register] = Mark::Unwritten;
    }

    pub(super) fn read_local(&self, address: u64, to: &mut [u8]) -> Result<()> {
        let start = address as usize;
        let from = self.local.get(start..start + to.len());
        let from = from.ok_or("an address outside of local memory")?;
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.ok_or("local memory is read, and nobody wrote it")?;
        }
        Ok(())
    }

    pub(super) fn write_local(&mut self, address: u64, from: &[u8]) -> Result<()> {
        let start = address as usize;
        let to = self.local.get_mut(start..start + from.len());
        let to = to.ok_or("an address outside of local memory")?;
        for (to, from) in to.iter_mut().zip(from) {
            *to = Some(*from);
        }
        Ok(())
    }

    pub(super) fn fence_registers(&mut self) {
        self.register_fences += 1;
    }

    /// The value of an accumulator for `wgmma`, which no other instruction may have used since the last fence. `None` unless
    /// `read` is true.
    pub(super) fn accumulator(&mut self, register: Register, read: bool) -> Result<Option<u64>> {
        let in_flight = self.marks[register] == Mark::InFlight;
        if self.register_fences == 0
            || !in_flight
                && self.used[register] == self.register_fences
                && self.marks[register] == Mark::Written
        {
            return Err("wgmma has an accumulator without a wgmma.fence since its last use".into());
        }
        if read && self.marks[register] == Mark::Unwritten {
            return Err("wgmma adds to an accumulator that nothing wrote".into());
        }
        Ok(read.then(|| self.values[register]))
    }

    pub(super) fn set_accumulator(&mut self, register: Register, value: u64) {
        self.values[register] = value;
        self.marks[register] = Mark::InFlight;
    }

    pub(super) fn land_accumulator(&mut self, register: Register) {
        self.marks[register] = Mark::Written;
        // The instruction's own use does not count once its group is complete.
        self.used[register] = self.register_fences.saturating_sub(1);
    }
}
