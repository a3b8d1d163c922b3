//! Who reads and writes a cell of shared memory, and when.

use std::collections::HashMap;

use super::block::WARP;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writer {
    Nobody,
    Thread(Written),
    /// Atomic instructions of any threads, the last one's.
    Atomics(Written),
    /// The TMA, whose data are there when a barrier in shared memory completes a phase.
    Tma {
        barrier: u64,
        phase: u32,
    },
    /// The cell is part of a barrier.
    Barrier,
}

/// A thread, and when it wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) number: usize,
    pub(super) turn: Turn,
    /// For those that learn of it through barriers in shared memory: its warp in the cluster, and the time.
    pub(super) warp: usize,
    pub(super) time: u64,
    /// The number of the thread's own fences.
    pub(super) fences: u32,
}

/// The number of barriers of the block, and of the thread's warp, so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) block: u32,
    pub(super) warp: u32,
}

#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) writer: Writer,
    pub(super) reader: Reader,
    /// When it was read.
    pub(super) read: Turn,
    /// The number of copies in flight to this cell.
    pub(super) arriving: u32,
    /// The number of asynchronous reads in flight.
    pub(super) leaving: u32,
    /// The finished asynchronous reads, the last one of each warpgroup.
    pub(super) left: Vec<Left>,
    /// The last read of each warp, in a kernel with barriers in shared memory.
    pub(super) reads: Vec<Left>,
}

/// A finished read: its warp in the cluster, or the first one of its warpgroup, the number of block barriers, and when it ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    pub(super) warp: usize,
    pub(super) turn: u32,
    pub(super) time: u64,
}

/// For each warp, the time up to which a thread knows what that warp did, through barriers in shared memory at which the warp
/// arrived.
pub(super) type Heard = HashMap<usize, u64>;

/// Whether a thread that has heard so much knows of what a warp did then.
pub(super) fn has_heard(heard: &Heard, warp: usize, time: u64) -> bool {
    heard.get(&warp).is_some_and(|heard| *heard >= time)
}

/// The thread that writes, with the number of its warp in the cluster, and what it knows of other warps.
pub(super) struct Author<'a> {
    pub(super) thread: usize,
    pub(super) warp: usize,
    pub(super) heard: &'a Heard,
}

impl Author<'_> {
    /// Whether each warp of the warpgroup is the writer's own or has told it of the read.
    pub(super) fn knows_of(&self, read: &Left) -> bool {
        (read.warp..read.warp + 4)
            .all(|warp| warp == self.warp || has_heard(self.heard, warp, read.time))
    }
}

/// The last reader, or all that it might be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    Thread(usize),
    /// Several threads of a warp.
    Warp(usize),
    Several,
}

impl Reader {
    pub(super) fn warp(self) -> Option<usize> {
        match self {
            Self::Thread(number) => Some(number / WARP),
            Self::Warp(warp) => Some(warp),
            Self::Several => None,
        }
    }
}

/// The reader, and what it knows.
pub(super) struct Observer<'a> {
    pub(super) reader: Reader,
    pub(super) heard: &'a Heard,
    /// The last phase of a barrier in shared memory that the reader has seen completed.
    pub(super) seen: &'a dyn Fn(u64) -> Option<u32>,
    /// For a read by the asynchronous proxy: the number of fences that each thread has run.
    pub(super) fences: Option<&'a dyn Fn(usize) -> u32>,
}
