//! A block: runs its threads in turn, each until it has to wait for others.

use std::{cell::RefCell, collections::HashMap};

use super::{
    Kernel, Result, TensorMap,
    barrier::Mbarriers,
    cluster::Message,
    copy::Handed,
    decode::{Operation, Place, Special, Value},
    global::Global,
    shared::Shared,
    thread::{State, Thread},
    tma::Loads,
    wgmma::Warpgroups,
};

/// The number of threads in a warp.
pub(super) const WARP: usize = 32;
/// The number of instructions that a thread may run without a wait. Beyond that, a loop counts as endless.
const MOST_INSTRUCTIONS: usize = 10_000_000;

pub(super) struct Block<'a> {
    pub(super) kernel: &'a Kernel,
    /// The block's number in its cluster, and that of its first warp.
    pub(super) number: usize,
    pub(super) first_warp: usize,
    pub(super) place: [u32; 3],
    grid: [u32; 3],
    size: [u32; 3],
    pub(super) parameters: &'a [u8],
    pub(super) maps: &'a [TensorMap],
    pub(super) global: &'a RefCell<&'a mut Global>,
    pub(super) shared: Shared,
    pub(super) threads: Vec<Thread>,
    pub(super) mbarriers: Mbarriers,
    pub(super) loads: Loads,
    pub(super) handed: Handed,
    pub(super) warpgroups: Warpgroups,
    /// What it has told other blocks of its cluster, by their numbers.
    pub(super) told: Vec<(usize, Message)>,
    timer: u64,
    /// The instructions that its threads ran.
    pub(super) count: u64,
}

/// What a thread does after an instruction.
pub(super) enum Flow {
    Next,
    Jump(usize),
    /// Stops at this instruction, in this state.
    Stop(State),
    /// Lets other threads run, then goes on.
    Yield,
}

impl<'a> Block<'a> {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        kernel: &'a Kernel,
        number: usize,
        place: [u32; 3],
        grid: [u32; 3],
        size: [u32; 3],
        shared: usize,
        parameters: &'a [u8],
        maps: &'a [TensorMap],
        global: &'a RefCell<&'a mut Global>,
    ) -> Self {
        let count = size.iter().product::<u32>();
        let first_warp = number * (count as usize).div_ceil(WARP);
        let threads = (0..count).map(|number| {
            let place = [
                number % size[0],
                number / size[0] % size[1],
                number / size[0] / size[1],
            ];
            Thread::new(place, kernel.registers, kernel.local)
        });
        Self {
            kernel,
            number,
            first_warp,
            place,
            grid,
            size,
            parameters,
            maps,
            global,
            shared: Shared::new(shared, kernel.grain, count as usize, first_warp),
            threads: threads.collect(),
            mbarriers: Mbarriers::default(),
            loads: Loads::default(),
            handed: Handed::default(),
            warpgroups: Warpgroups::default(),
            told: Vec::new(),
            timer: 0,
            count: 0,
        }
    }

    /// Runs every thread until it has to wait. Returns whether any could run.
    pub(super) fn turn(&mut self) -> Result<bool> {
        // Every other block runs from its last thread to its first, because no order is promised.
        let count = self.threads.len();
        let backwards = self.place.iter().sum::<u32>() % 2 == 1;
        let mut moved = false;
        for turn in 0..count {
            let thread = if backwards { count - 1 - turn } else { turn };
            if self.threads[thread].state == State::Running {
                moved = true;
                self.advance(thread)
                    .map_err(|error| self.located(thread, &error))?;
            }
        }
        if self.is_over() {
            self.end()?;
            return Ok(moved);
        }
        moved |= self.run_together()?;
        moved |= self.pass_barrier();
        Ok(moved)
    }

    pub(super) fn is_over(&self) -> bool {
        let exited = |thread: &Thread| thread.state == State::Exited;
        self.threads.iter().all(exited)
    }

    fn end(&self) -> Result<()> {
        if self.loads.any() {
            return Err("the block ends while the TMA writes its shared memory".into());
        }
        if self.handed.any() {
            return Err(
                "the block ends while copies that a barrier waits for are on their way".into(),
            );
        }
        if self.warpgroups.any() {
            return Err("the block ends before wgmma.wait_group".into());
        }
        Ok(())
    }

    pub(super) fn located(&self, thread: usize, error: &str) -> String {
        let text = &self.kernel.instructions[self.threads[thread].next].text;
        let line: String = text.chars().take(200).collect();
        format!("{error}; thread {thread}, at `{line}`")
    }

    /// The error if no thread can go on.
    pub(super) fn stuck(&self) -> String {
        let mut waits: Vec<(String, usize)> = Vec::new();
        for (number, thread) in self.threads.iter().enumerate() {
            let wait = match thread.state {
                State::Exited => "exited".to_string(),
                _ => self
                    .located(number, "")
                    .split_once('`')
                    .unwrap()
                    .1
                    .to_string(),
            };
            match waits.iter_mut().find(|(known, _)| *known == wait) {
                Some((_, count)) => *count += 1,
                None => waits.push((wait, 1)),
            }
        }
        format!("all threads wait for ever: {waits:?}")
    }

    /// `bar.sync`: passes if all threads that it waits for are there. Those that have ended are not waited for.
    fn pass_barrier(&mut self) -> bool {
        let waiting = |thread: &Thread| match thread.state {
            State::AtBarrier { number, count } => Some((number, count)),
            _ => None,
        };
        let running = |thread: &&Thread| thread.state != State::Exited;
        let running = self.threads.iter().filter(running).count();
        let mut here = HashMap::new();
        for wanted in self.threads.iter().filter_map(waiting) {
            *here.entry(wanted).or_insert(0) += 1;
        }
        let full = |((_, count), here): (&(u32, Option<u32>), &usize)| {
            *here == count.map_or(running, |count| count as usize)
        };
        let Some(wanted) = here.iter().find(|entry| full(*entry)).map(|entry| *entry.0) else {
            return false;
        };
        // Of all threads, even if some alone have met: a race with the others may be missed.
        self.order();
        for thread in &mut self.threads {
            if waiting(thread) == Some(wanted) {
                thread.state = State::Running;
                thread.next += 1;
            }
        }
        true
    }

    /// Orders what the block's threads did before that before what they do from now on.
    pub(super) fn order(&mut self) {
        self.shared.turn += 1;
        // Phases that one thread has seen completed are now known to all.
        let mut seen = HashMap::new();
        for (&barrier, &phase) in self.threads.iter().flat_map(|thread| &thread.seen) {
            let known = seen.entry(barrier).or_insert(phase);
            *known = phase.max(*known);
        }
        for thread in &mut self.threads {
            thread.seen.clone_from(&seen);
        }
    }

    fn advance(&mut self, thread: usize) -> Result<()> {
        for _ in 0..MOST_INSTRUCTIONS {
            self.count += 1;
            match self.step(thread)? {
                Flow::Next => self.threads[thread].next += 1,
                Flow::Jump(to) => self.threads[thread].next = to,
                Flow::Stop(state) => {
                    self.threads[thread].state = state;
                    return Ok(());
                }
                Flow::Yield => {
                    self.threads[thread].next += 1;
                    return Ok(());
                }
            }
        }
        Err("a loop does not end".into())
    }

    fn step(&mut self, thread: usize) -> Result<Flow> {
        let instruction = &self.kernel.instructions[self.threads[thread].next];
        if let Some((predicate, negated)) = instruction.guard
            && (self.threads[thread].get(predicate)? != 0) == negated
        {
            return Ok(Flow::Next);
        }
        match &instruction.operation {
            Operation::Compute { function, to, from } => {
                let mut arguments = [0; 4];
                for (argument, value) in arguments.iter_mut().zip(from) {
                    *argument = self.value(thread, *value)?;
                }
                let result = function(&arguments).ok_or("the result is undefined")?;
                self.threads[thread].set(*to, result)?;
            }
            Operation::Pack { to, from, bits } => {
                let mut packed = 0;
                for (index, value) in from.iter().enumerate() {
                    let value = self.moved(thread, *value)?;
                    packed |= (value & mask(*bits)) << (index * bits);
                }
                self.threads[thread].set(*to, packed)?;
            }
            Operation::Unpack { to, from, bits } => {
                let value = self.moved(thread, *from)?;
                for (index, to) in to.iter().enumerate() {
                    if let Some(to) = to {
                        self.threads[thread].set(*to, value >> (index * bits) & mask(*bits))?;
                    }
                }
            }
            Operation::Branch(to) => return Ok(Flow::Jump(*to)),
            Operation::Exit => return Ok(Flow::Stop(State::Exited)),
            Operation::Sleep => {}
            Operation::Barrier { number, count } => {
                let count = count.map(|count| self.value(thread, count)).transpose()?;
                return Ok(Flow::Stop(State::AtBarrier {
                    number: self.value(thread, *number)? as u32,
                    count: count.map(|count| count as u32),
                }));
            }
            Operation::MemoryFence => {}
            Operation::ActiveMask(to) => {
                let first = thread / WARP * WARP;
                let warp = first..self.threads.len().min(first + WARP);
                let running = |lane: &usize| self.threads[first + lane].state != State::Exited;
                let mask = (0..warp.len())
                    .filter(running)
                    .fold(0, |mask, lane| mask | 1 << lane);
                self.threads[thread].set(*to, mask)?;
            }
            Operation::Carry(operation) => self.carry(thread, operation)?,
            Operation::Atomic(atomic) => self.atomic(thread, atomic)?,
            Operation::ProxyFence => self.threads[thread].proxy_fences += 1,
            Operation::Transfer(transfer) => self.transfer(thread, transfer)?,
            Operation::Copy(copy) => self.copy(thread, copy)?,
            Operation::Mbarrier(operation) => return self.mbarrier(thread, operation),
            Operation::Cluster(operation) => return self.cluster(thread, operation),
            Operation::Tma(load) => self.tma_load(thread, load)?,
            Operation::Mma(_)
            | Operation::Wgmma(_)
            | Operation::Wmma(_)
            | Operation::Ldmatrix(_)
            | Operation::Warp(_) => {
                return Ok(Flow::Stop(State::Together));
            }
        }
        Ok(Flow::Next)
    }

    /// A value that is only moved: see [`Global::poisoned`](super::Global::poisoned).
    fn moved(&mut self, thread: usize, value: Value) -> Result<u64> {
        match self.value(thread, value) {
            Err(_) if self.global.borrow().is_poisoned() => Ok(u64::MAX),
            value => value,
        }
    }

    pub(super) fn value(&mut self, thread: usize, value: Value) -> Result<u64> {
        match value {
            Value::Immediate(value) => Ok(value),
            Value::Register(register) => self.threads[thread].get(register),
            Value::Negated(register) => Ok(self.threads[thread].get(register)? ^ 1),
            Value::Special(special) => Ok(u64::from(match special {
                Special::Thread(axis) => self.threads[thread].place[axis],
                Special::Threads(axis) => self.size[axis],
                Special::Block(axis) => self.place[axis],
                Special::Blocks(axis) => self.grid[axis],
                Special::Lane => (thread % WARP) as u32,
                Special::LanesBelow => (1u32 << (thread % WARP)) - 1,
                Special::WarpSize => WARP as u32,
                Special::Warp => (thread / WARP) as u32,
                Special::Timer => {
                    self.timer += 1;
                    return Ok(self.timer);
                }
            })),
        }
    }

    pub(super) fn address(&mut self, thread: usize, place: &Place) -> Result<u64> {
        let base = self.value(thread, place.base)?;
        Ok(base.wrapping_add_signed(place.offset))
    }
}

fn mask(bits: usize) -> u64 {
    u64::MAX >> (64 - bits)
}
