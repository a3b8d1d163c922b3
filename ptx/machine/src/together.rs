//! Instructions that threads run together: those of a warp, or of a warpgroup.

use std::ops::Range;

use super::{
    Result,
    block::{Block, WARP},
    decode::Operation,
    thread::{State, Thread},
    warp, wmma,
};

impl Block<'_> {
    /// Runs the instructions of warps and warpgroups whose threads have all arrived.
    pub(super) fn run_together(&mut self) -> Result<bool> {
        let kernel = self.kernel;
        let mut moved = false;
        for first in (0..self.threads.len()).step_by(WARP) {
            let warp = first..self.threads.len().min(first + WARP);
            let together = |thread: &Thread| thread.state == State::Together;
            let Some(leader) = warp.clone().find(|&number| together(&self.threads[number])) else {
                continue;
            };
            let next = self.threads[leader].next;
            let operation = &kernel.instructions[next].operation;
            if let Operation::Warp(operation) = operation {
                moved |= self.run_warp(operation, warp)?;
                continue;
            }
            let size = match operation {
                Operation::Wgmma(_) => 4 * WARP,
                _ => WARP,
            };
            let group = first..first + size;
            if first % size != 0 {
                continue;
            }
            if group.end > self.threads.len() {
                return Err(self.located(leader, "there is no whole group of warps"));
            }
            // The ISA asks for whole warps. In a warp of which threads have ended, a GPU stores what the others hold, and CubeCL's probe of
            // a device's throughput has it do that.
            let partial = matches!(operation, Operation::Wmma(wmma::Operation::Store { .. }));
            let here = |thread: &Thread| {
                together(thread) && thread.next == next || partial && thread.state == State::Exited
            };
            if !self.threads[group.clone()].iter().all(here) {
                continue;
            }
            match operation {
                Operation::Wgmma(operation) => self.wgmma(operation, group.clone()),
                Operation::Mma(operation) => self.mma(operation, group.clone()),
                Operation::Wmma(operation) => self.wmma(operation, group.clone()),
                Operation::Ldmatrix(operation) => self.ldmatrix(operation, group.clone()),
                _ => unreachable!("threads wait at others alone"),
            }
            .map_err(|error| self.located(first, &error))?;
            self.go_on(group);
            moved = true;
        }
        Ok(moved)
    }

    /// Runs an instruction of some threads of a warp, if all that take part have arrived.
    fn run_warp(&mut self, operation: &warp::Operation, warp: Range<usize>) -> Result<bool> {
        for leader in warp.clone() {
            if self.threads[leader].state != State::Together {
                continue;
            }
            let next = self.threads[leader].next;
            let Operation::Warp(here) = &self.kernel.instructions[next].operation else {
                continue;
            };
            if !std::ptr::eq(here, operation) {
                continue;
            }
            let members = self.value(leader, operation.members)?;
            if members >> (leader - warp.start) & 1 == 0 {
                return Err(self.located(leader, "the thread is not in its own mask"));
            }
            let lanes: Vec<usize> = (0..warp.len())
                .filter(|lane| members >> lane & 1 == 1)
                .filter(|lane| self.threads[warp.start + lane].state != State::Exited)
                .collect();
            let arrived = |lane: &usize| {
                let thread = &self.threads[warp.start + lane];
                thread.state == State::Together && thread.next == next
            };
            if !lanes.iter().all(arrived) {
                continue;
            }
            self.warp_operation(operation, warp.clone(), &lanes)
                .map_err(|error| self.located(leader, &error))?;
            for lane in lanes {
                self.go_on(warp.start + lane..warp.start + lane + 1);
            }
            return Ok(true);
        }
        Ok(false)
    }

    fn go_on(&mut self, threads: Range<usize>) {
        let waiting = |thread: &&mut Thread| thread.state == State::Together;
        for thread in self.threads[threads].iter_mut().filter(waiting) {
            thread.state = State::Running;
            thread.next += 1;
        }
    }
}
