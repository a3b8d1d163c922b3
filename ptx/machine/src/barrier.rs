//! `mbarrier`: barriers in shared memory. A phase completes when all arrivals and all bytes are there.

use std::collections::HashMap;

use super::{
    Result,
    access::{Author, Heard},
    block::{Block, Flow, WARP},
    decode::{Operands, Place, Value},
    parse::Register,
};

/// The number of failed polls of a thread, with all other threads run in between, after which it counts as waiting forever.
const MOST_POLLS: u32 = 1000;

pub(super) enum Operation {
    Initialize {
        place: Place,
        arrivals: Value,
    },
    /// The state that it returns is the number of the phase.
    Arrive {
        to: Option<Register>,
        place: Place,
        count: Option<Value>,
    },
    /// Arrives, and adds to the bytes that the phase waits for.
    Expect {
        to: Option<Register>,
        place: Place,
        bytes: Value,
    },
    /// Tests whether a phase is complete.
    Try {
        to: Register,
        place: Place,
        phase: Phase,
    },
    /// The barrier is no more.
    End(Place),
}

#[derive(Clone, Copy)]
pub(super) enum Phase {
    /// The current one, or the one before it, by the last bit of its number.
    Parity(Value),
    /// The state that an arrival returned.
    State(Value),
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
    let words = opcode.strip_prefix("mbarrier.")?;
    // The defaults need not be named.
    let words = words.replace(".shared::cta", ".shared");
    Some(match &*words {
        "init.shared.b64" => Operation::Initialize {
            place: operands.place(0),
            arrivals: operands.value(1),
        },
        "inval.shared.b64" => Operation::End(operands.place(0)),
        "arrive.shared.b64" | "arrive.release.cta.shared.b64" => Operation::Arrive {
            to: operands.sinks(0)[0],
            place: operands.place(1),
            count: (operands.count() == 3).then(|| operands.value(2)),
        },
        "arrive.expect_tx.shared.b64" | "arrive.expect_tx.release.cta.shared.b64" => {
            Operation::Expect {
                to: operands.sinks(0)[0],
                place: operands.place(1),
                bytes: operands.value(2),
            }
        }
        "try_wait.parity.shared.b64" | "test_wait.parity.shared.b64" => Operation::Try {
            to: operands.register(0),
            place: operands.place(1),
            phase: Phase::Parity(operands.value(2)),
        },
        "try_wait.shared.b64" | "test_wait.shared.b64" => Operation::Try {
            to: operands.register(0),
            place: operands.place(1),
            phase: Phase::State(operands.value(2)),
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
                let heard = &self.threads[thread].heard;
                let warp = self.first_warp + thread / WARP;
                let author = Author {
                    thread,
                    warp,
                    heard,
                };
                self.shared.make_barrier(address, &author)?;
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
            Operation::End(place) => {
                let address = self.address(thread, place)?;
                self.usable(address, thread)?;
                self.mbarriers.0.remove(&address);
                self.shared.end_barrier(address)?;
            }
            Operation::Expect { to, place, bytes } => {
                let address = self.address(thread, place)?;
                let bytes = self.value(thread, *bytes)?;
                let (warp, time) = self.arrives(thread);
                let barrier = self.usable(address, thread)?;
                let phase = barrier.phase;
                barrier.bytes += bytes as i64;
                barrier.arrive(1, warp, time)?;
                if let Some(to) = to {
                    self.threads[thread].set(*to, u64::from(phase))?;
                }
            }
            Operation::Arrive { to, place, count } => {
                let address = self.address(thread, place)?;
                let count = count.map_or(Ok(1), |count| self.value(thread, count))? as u32;
                let (warp, time) = self.arrives(thread);
                let barrier = self.usable(address, thread)?;
                let phase = barrier.phase;
                barrier.arrive(count, warp, time)?;
                if let Some(to) = to {
                    self.threads[thread].set(*to, u64::from(phase))?;
                }
            }
            Operation::Try {
                to,
                place,
                phase: asked,
            } => {
                let address = self.address(thread, place)?;
                let phase = self.usable(address, thread)?.phase;
                let done = match asked {
                    Phase::Parity(parity) => {
                        let parity = self.value(thread, *parity)? as u32;
                        if parity > 1 {
                            return Err(format!("parity {parity}"));
                        }
                        phase % 2 != parity
                    }
                    Phase::State(state) => self.value(thread, *state)? < u64::from(phase),
                };
                self.threads[thread].set(*to, u64::from(done))?;
                if !done {
                    // Data arrive only after a poll.
                    self.arrive_one(address)?;
                    self.land_one(address)?;
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

    /// The warp of a thread that arrives at a barrier, and the time: what it does from now on, it does later.
    pub(super) fn arrives(&mut self, thread: usize) -> (usize, u64) {
        let time = self.shared.time;
        self.shared.time += 1;
        (self.first_warp + thread / WARP, time)
    }

    /// A thread will arrive at a barrier when its copies have, which the barrier waits for besides, unless it counts with that.
    pub(super) fn expect_copies(&mut self, address: u64, thread: usize, more: bool) -> Result<()> {
        let barrier = self.usable(address, thread)?;
        barrier.pending += u32::from(more);
        Ok(())
    }

    /// The copies of a thread have arrived.
    pub(super) fn complete_copies(&mut self, address: u64, thread: usize) -> Result<()> {
        let (warp, time) = self.arrives(thread);
        let barrier = self.mbarriers.0.get_mut(&address);
        let barrier = barrier.ok_or("the barrier that waits for copies is no more")?;
        barrier.arrive(1, warp, time)
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
        // Bytes may arrive before a thread says that it waits for them.
        barrier.complete()
    }
}
