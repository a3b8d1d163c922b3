//! A thread: its registers, and what it has waited for.

use std::collections::HashMap;

use super::{Result, copy::Copies, parse::Register, shared::Heard};

/// Where shared memory begins in its own space. Not at zero: what is first belongs to the system.
pub(super) const SHARED_BASE: u64 = 1024;
/// Bytes of a window of generic addresses.
pub(super) const WINDOW: u64 = 1 << 24;
/// Generic addresses of the parameters.
pub(super) const PARAMETER_WINDOW: u64 = 0x7E00_0000_0000_0000;
/// Generic addresses of shared memory.
pub(super) const SHARED_WINDOW: u64 = 0x7F00_0000_0000_0000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Running,
    AtBarrier,
    /// At an instruction that others have to come to.
    Together,
    Exited,
}

/// What is known of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Unwritten,
    Written,
    /// An asynchronous instruction writes it.
    InFlight,
}

#[derive(Debug)]
pub(super) struct Thread {
    pub(super) place: [u32; 3],
    /// The next instruction.
    pub(super) next: usize,
    pub(super) state: State,
    pub(super) copies: Copies,
    /// `fence.proxy.async` that it ran.
    pub(super) proxy_fences: u32,
    /// `wgmma.fence` that it ran.
    register_fences: u32,
    /// Of barriers in shared memory, the phases that it saw completed.
    pub(super) seen: HashMap<u64, u32>,
    pub(super) heard: Heard,
    /// Looks at a barrier that were in vain, one after the other.
    pub(super) polls: u32,
    values: Vec<u64>,
    marks: Vec<Mark>,
    /// Fences at a register's last use.
    used: Vec<u32>,
}

impl Thread {
    pub(super) fn new(place: [u32; 3], registers: usize) -> Self {
        Self {
            place,
            next: 0,
            state: State::Running,
            copies: Copies::default(),
            proxy_fences: 0,
            register_fences: 0,
            seen: HashMap::new(),
            heard: Heard::new(),
            polls: 0,
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

    pub(super) fn fence_registers(&mut self) {
        self.register_fences += 1;
    }

    /// What an accumulator holds, for `wgmma`: no other instruction may have used it since the last fence. `None` if it is
    /// not to be read.
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
        // The instruction's own use is over with its group.
        self.used[register] = self.register_fences.saturating_sub(1);
    }
}
