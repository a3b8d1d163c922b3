//! `mbarrier`: barriers in shared memory. A phase completes when all arrivals and all bytes are there.

use std::collections::HashMap;

use super::{
    Result,
    block::{Block, Flow, WARP},
    decode::{Operands, Place, Value},
    parse::Register,
    shared::{Author, Heard},
};

/// The number of failed polls of a thread, with all other threads run in between, after which it counts as waiting forever.
const MOST_POLLS: u32 = 1000;

pub(super) enum Operation {
    Initialize {
        place: Place,
        arrivals: Value,
    },
    Arrive {
        place: Place,
        count: Value,
    },
    /// Arrives, and adds to the bytes that the phase waits for.
    Expect {
        place: Place,
        bytes: Value,
    },
    /// Tests whether the phase with this parity is complete.
    Try {
        to: Register,
        place: Place,
        parity: Value,
    },
}

#[derive(Debug, Default)]
pub(super) struct Mbarriers(HashMap<u64, Mbarrier>);

#[derive(Debug)]
struct Mbarrier {
    /// The number of arrivals that complete a phase.
    arrivals: u32,
    pending: u32,
    bytes: i64,
    /// The number of the phase that is not yet complete.
    phase: u32,
    /// The thread that initialized it, and the numbers of block barriers and of its own fences, of both kinds, before that.
    thread: usize,
    turn: u32,
    fences: u32,
    barrier_fences: u32,
    /// Whether all threads of the cluster know of it.
    published: bool,
    /// What waiting threads learn from the warps that have arrived so far.
    told: Heard,
    /// `told` at the time each phase was completed.
    phases: Vec<Heard>,
}

impl Mbarrier {
    fn arrive(&mut self, count: u32, warp: usize, time: u64) -> Result<()> {
        let rest = self.pending.checked_sub(count);
        self.pending = rest.ok_or("more arrive at a barrier than it waits for")?;
        self.told.insert(warp, time);
        self.complete()
    }

    fn complete(&mut self) -> Result<()> {
        if self.pending == 0 && self.bytes < 0 {
            return Err("the TMA brings more bytes than the barrier waits for".into());
        }
        if self.pending == 0 && self.bytes == 0 {
            self.pending = self.arrivals;
            self.phase += 1;
            self.phases.push(self.told.clone());
        }
        Ok(())
    }
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Operation> {
    Some(match opcode {
        "mbarrier.init.shared.b64" => Operation::Initialize {
            place: operands.place(0),
            arrivals: operands.value(1),
        },
        "mbarrier.arrive.shared::cta.b64" => {
            operands.register(0);
            Operation::Arrive {
                place: operands.place(1),
                count: operands.value(2),
            }
        }
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64" => {
            // The register for the state, which a wait by parity does not need.
            operands.register(0);
            Operation::Expect {
                place: operands.place(1),
                bytes: operands.value(2),
            }
        }
        "mbarrier.try_wait.parity.shared.b64" => Operation::Try {
            to: operands.register(0),
            place: operands.place(1),
            parity: operands.value(2),
        },
        _ => return None,
    })
}

impl Block<'_> {
    pub(super) fn mbarrier(&mut self, thread: usize, operation: &Operation) -> Result<Flow> {
        match operation {
            Operation::Initialize { place, arrivals } => {
                let address = self.address(thread, place)?;
                if !address.is_multiple_of(8) {
                    return Err(format!("a barrier at {address:#x}"));
                }
                let index = self.shared.index(address, 2)?;
                let heard = &self.threads[thread].heard;
                let warp = self.first_warp + thread / WARP;
                let author = Author {
                    thread,
                    warp,
                    heard,
                };
                self.shared.make_barrier(index, &author)?;
                let arrivals = self.value(thread, *arrivals)? as u32;
                let barrier = Mbarrier {
                    arrivals,
                    pending: arrivals,
                    bytes: 0,
                    phase: 0,
                    thread,
                    turn: self.shared.turn,
                    fences: self.threads[thread].proxy_fences,
                    barrier_fences: self.threads[thread].barrier_fences,
                    published: false,
                    told: Heard::new(),
                    phases: Vec::new(),
                };
                self.mbarriers.0.insert(address, barrier);
            }
            Operation::Expect { place, bytes } => {
                let address = self.address(thread, place)?;
                let bytes = self.value(thread, *bytes)?;
                let (warp, time) = (self.first_warp + thread / WARP, self.shared.time);
                let barrier = self.usable(address, thread)?;
                barrier.bytes += bytes as i64;
                barrier.arrive(1, warp, time)?;
            }
            Operation::Arrive { place, count } => {
                let address = self.address(thread, place)?;
                let count = self.value(thread, *count)? as u32;
                let (warp, time) = (self.first_warp + thread / WARP, self.shared.time);
                self.usable(address, thread)?.arrive(count, warp, time)?;
            }
            Operation::Try { to, place, parity } => {
                let address = self.address(thread, place)?;
                let parity = self.value(thread, *parity)? as u32;
                if parity > 1 {
                    return Err(format!("parity {parity}"));
                }
                let phase = self.usable(address, thread)?.phase;
                let done = phase % 2 != parity;
                self.threads[thread].set(*to, u64::from(done))?;
                if !done {
                    // Data arrive only after a poll.
                    self.arrive_one(address)?;
                    self.threads[thread].polls += 1;
                    if self.threads[thread].polls > MOST_POLLS {
                        return Err(format!("phase {phase} never completes"));
                    }
                    return Ok(Flow::Yield);
                }
                self.threads[thread].polls = 0;
                if let Some(complete) = phase.checked_sub(1) {
                    let told = &self.mbarriers.0[&address].phases[complete as usize];
                    let thread = &mut self.threads[thread];
                    thread.seen.insert(address, complete);
                    for (&warp, &time) in told {
                        let heard = thread.heard.entry(warp).or_insert(time);
                        *heard = time.max(*heard);
                    }
                }
            }
        }
        Ok(Flow::Next)
    }

    fn usable(&mut self, address: u64, thread: usize) -> Result<&mut Mbarrier> {
        let turn = self.shared.turn;
        let barrier = self.mbarriers.0.get_mut(&address);
        let barrier = barrier.ok_or_else(|| format!("no barrier is at {address:#x}"))?;
        if barrier.turn == turn && barrier.thread != thread && !barrier.published {
            return Err("a barrier is used, and no barrier orders that after its start".into());
        }
        Ok(barrier)
    }

    /// All threads of the cluster have met: they know of the barriers after whose start the owner ran `fence.mbarrier_init`.
    pub(super) fn publish_barriers(&mut self) {
        for barrier in self.mbarriers.0.values_mut() {
            let fences = self.threads[barrier.thread].barrier_fences;
            barrier.published |= fences > barrier.barrier_fences;
        }
    }

    /// Checks that another block of the cluster may use the barrier at an address.
    pub(super) fn check_published(&mut self, address: u64) -> Result<()> {
        match self.mbarriers.0.get(&address) {
            Some(barrier) if barrier.published => Ok(()),
            Some(_) => Err(
                "a barrier is used by another block, and no fence.mbarrier_init and barrier of the cluster order that \
                 after its start"
                    .into(),
            ),
            None => Err(format!("no barrier is at {address:#x} of the other block")),
        }
    }

    /// A warp of another block of the cluster arrives.
    pub(super) fn arrive_from_afar(&mut self, address: u64, warp: usize, time: u64) -> Result<()> {
        self.check_published(address)?;
        let barrier = self.mbarriers.0.get_mut(&address).expect("checked");
        barrier.arrive(1, warp, time)
    }

    /// For the TMA: the phase that its bytes count for.
    pub(super) fn phase_for_tma(&mut self, address: u64, thread: usize) -> Result<u32> {
        let barrier = self.usable(address, thread)?;
        let (owner, fences, phase) = (barrier.thread, barrier.fences, barrier.phase);
        if self.threads[owner].proxy_fences == fences {
            return Err(
                "the TMA is given a barrier without a fence.proxy.async since its start".into(),
            );
        }
        Ok(phase)
    }

    /// Bytes of the TMA have arrived.
    pub(super) fn complete_bytes(&mut self, address: u64, bytes: usize) -> Result<()> {
        let barrier = self.mbarriers.0.get_mut(&address).expect("checked before");
        barrier.bytes -= bytes as i64;
        // What another block loads may arrive before this one says that it waits for it.
        if barrier.bytes < 0 && !barrier.published {
            return Err("the TMA brings more bytes than the barrier waits for".into());
        }
        barrier.complete()
    }
}
