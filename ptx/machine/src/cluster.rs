//! Clusters: blocks that run at the same time, arrive at each other's barriers, and load tiles for each other.

use super::{
    Result,
    access::Heard,
    block::{Block, Flow},
    decode::{Function, Operands, Place},
    thread::{State, WINDOW},
    tma::Tile,
};

pub(super) enum Operation {
    /// `fence.mbarrier_init`.
    BarrierFence,
    /// Arrives at the barrier of the cluster.
    Arrive(Arrival),
    /// Waits there for all threads of the cluster.
    Wait,
    /// Arrives at a barrier in shared memory of any block.
    ArriveAt(Place),
}

/// What a thread's arrival at the barrier of the cluster orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// Only barriers that were fenced.
    Relaxed,
    /// All memory of the thread.
    Release,
}

/// What a block does in another one of its cluster.
#[derive(Debug)]
pub(super) enum Message {
    /// A warp arrives at a barrier, and has come so far.
    Arrive {
        address: u64,
        warp: usize,
        time: u64,
    },
    /// A tile is requested, by a thread of a warp that has heard so much.
    Load {
        tile: Tile,
        warp: usize,
        heard: Heard,
    },
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Operation> {
    Some(match opcode {
        "fence.mbarrier_init.release.cluster" => Operation::BarrierFence,
        "barrier.cluster.arrive.relaxed.aligned" => Operation::Arrive(Arrival::Relaxed),
        "barrier.cluster.arrive.release.aligned" => Operation::Arrive(Arrival::Release),
        "barrier.cluster.wait.acquire.aligned" => Operation::Wait,
        // One arrival, if no count is given.
        "mbarrier.arrive.shared::cluster.b64" if operands.count() == 2 => {
            Operation::ArriveAt(operands.place(1))
        }
        _ => return None,
    })
}

/// `mapa`: the address, in the memory of the whole cluster, of the same place in a block. A plain address is this block's own.
pub(super) fn function(opcode: &str) -> Option<(usize, Function)> {
    let there = |&[address, block, ..]: &[u64; 4]| {
        let inside = address < WINDOW && block < 16;
        inside.then_some(address + (block + 1) * WINDOW)
    };
    (opcode == "mapa.shared::cluster.u32").then(|| (2, Box::new(there) as Function))
}

pub(super) struct Cluster<'a>(Vec<Block<'a>>);

impl<'a> Cluster<'a> {
    pub(super) fn new(blocks: Vec<Block<'a>>) -> Self {
        Self(blocks)
    }

    /// Runs the blocks in turn until all have ended, and returns how many instructions their threads ran.
    pub(super) fn run(mut self) -> Result<u64> {
        loop {
            let mut moved = false;
            for number in 0..self.0.len() {
                let block = &mut self.0[number];
                if !block.is_over() {
                    let place = block.place;
                    let at = |error| format!("block {place:?}: {error}");
                    moved |= block.turn().map_err(at)?;
                    self.deliver(number).map_err(at)?;
                }
            }
            if self.0.iter().all(Block::is_over) {
                return Ok(self.0.iter().map(|block| block.count).sum());
            }
            if !moved && !self.pass_barrier() {
                let block = self.0.iter().find(|block| !block.is_over());
                let block = block.expect("not all are over");
                return Err(format!("block {:?}: {}", block.place, block.stuck()));
            }
        }
    }

    /// Does in the other blocks what a block has told them.
    fn deliver(&mut self, from: usize) -> Result<()> {
        for (to, message) in std::mem::take(&mut self.0[from].told) {
            let block = self
                .0
                .get_mut(to)
                .ok_or_else(|| format!("the cluster has no block {to}"))?;
            if block.is_over() {
                return Err(format!(
                    "block {to} of the cluster has ended, and has no shared memory"
                ));
            }
            match message {
                Message::Arrive {
                    address,
                    warp,
                    time,
                } => block.arrive_from_afar(address, warp, time)?,
                Message::Load { tile, warp, heard } => block.load_from_afar(tile, warp, &heard)?,
            }
        }
        Ok(())
    }

    /// `barrier.cluster.wait`: passes if all threads that have not exited are there. (They might pass when all have arrived; this is
    /// later, and orders no more.)
    fn pass_barrier(&mut self) -> bool {
        let mut threads = self.0.iter().flat_map(|block| &block.threads);
        let waits = |state| matches!(state, State::AtCluster | State::Exited);
        if !threads.all(|thread| waits(thread.state)) {
            return false;
        }
        for block in &mut self.0 {
            block.publish_barriers();
            let threads = || block.threads.iter();
            if threads().all(|thread| thread.arrived != Some(Arrival::Relaxed)) {
                block.order();
            }
            for thread in &mut block.threads {
                if thread.state == State::AtCluster {
                    thread.state = State::Running;
                    thread.next += 1;
                    thread.arrived = None;
                }
            }
        }
        true
    }
}

impl Block<'_> {
    pub(super) fn cluster(&mut self, thread: usize, operation: &Operation) -> Result<Flow> {
        match operation {
            Operation::BarrierFence => self.threads[thread].barrier_fences += 1,
            Operation::Arrive(arrival) => {
                if self.threads[thread].arrived.replace(*arrival).is_some() {
                    return Err("a thread arrives twice in a phase of the cluster's barrier".into());
                }
            }
            Operation::Wait => {
                if self.threads[thread].arrived.is_none() {
                    return Err("a thread waits for the cluster, and has not arrived".into());
                }
                return Ok(Flow::Stop(State::AtCluster));
            }
            Operation::ArriveAt(place) => {
                let address = self.address(thread, place)?;
                let (block, address) = (address / WINDOW, address % WINDOW);
                let block = block
                    .checked_sub(1)
                    .map_or(self.number, |number| number as usize);
                let (warp, time) = self.arrives(thread);
                let message = Message::Arrive {
                    address,
                    warp,
                    time,
                };
                self.tell(block, message);
            }
        }
        Ok(Flow::Next)
    }

    pub(super) fn tell(&mut self, block: usize, message: Message) {
        self.told.push((block, message));
    }
}
