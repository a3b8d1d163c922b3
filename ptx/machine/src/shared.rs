//! Shared memory, with the last writer and reader of each of its cells.
//!
//! A cell is as large as the smallest piece that the kernel reads or writes. Barriers of the block order threads, those of a warp the
//! threads of that warp: what one thread wrote (or read) since the last barrier, no other thread may read (or write), unless it knows
//! through barriers in shared memory that the write (or read) is over.

use std::ops::Range;

use super::{
    Result,
    access::{Author, Cell, Left, Observer, Reader, Turn, Writer, Written, has_heard},
    block::WARP,
    thread::SHARED_BASE,
};

#[derive(Debug)]
pub(super) struct Shared {
    bytes: Vec<u8>,
    cells: Vec<Cell>,
    /// The bytes of a cell.
    grain: usize,
    /// The number of block barriers so far.
    pub(super) turn: u32,
    /// The number of barriers of each warp so far.
    warp_turns: Vec<u32>,
    /// The first warp's number in the cluster.
    first_warp: usize,
    /// The number of times that asynchronous reads have ended, or a warp has arrived at a barrier in shared memory.
    pub(super) time: u64,
    /// Whether there has been such a barrier.
    has_barriers: bool,
}

impl Shared {
    pub(super) fn new(bytes: usize, grain: usize, threads: usize, first_warp: usize) -> Self {
        let never = Turn {
            block: u32::MAX,
            warp: 0,
        };
        let cell = Cell {
            writer: Writer::Nobody,
            reader: Reader::Several,
            read: never,
            arriving: 0,
            leaving: 0,
            left: Vec::new(),
            reads: Vec::new(),
        };
        let bytes = bytes.next_multiple_of(4);
        Self {
            bytes: vec![0xCD; bytes],
            cells: vec![cell; bytes / grain],
            grain,
            turn: 0,
            warp_turns: vec![0; threads.div_ceil(WARP)],
            first_warp,
            time: 0,
            has_barriers: false,
        }
    }

    /// What a thread of the warp did before is ordered before what its others do from now on.
    pub(super) fn order_warp(&mut self, warp: usize) {
        self.warp_turns[warp] += 1;
    }

    /// Now, for a thread; `usize::MAX` is that of another block.
    fn now(&self, thread: usize) -> Turn {
        Turn {
            block: self.turn,
            warp: self.warp_turns.get(thread / WARP).copied().unwrap_or(0),
        }
    }

    /// A thread that writes now.
    pub(super) fn written(&self, number: usize, fences: u32) -> Written {
        Written {
            number,
            turn: self.now(number),
            warp: self.first_warp + number / WARP,
            time: self.time,
            fences,
        }
    }

    /// Whether a barrier orders what a thread, or threads, of a warp did then before what a thread does now.
    fn is_ordered(&self, then: Turn, by: Reader, thread: usize) -> bool {
        then.block != self.turn
            || by == Reader::Thread(thread)
            || by.warp() == Some(thread / WARP) && then.warp != self.now(thread).warp
    }

    /// Where in the memory some bytes are, and their cells.
    fn place(&self, address: u64, size: usize) -> Result<(usize, Range<usize>)> {
        let offset = address
            .checked_sub(SHARED_BASE)
            .map(|offset| offset as usize);
        let offset = offset.filter(|offset| offset + size <= self.bytes.len());
        let offset = offset.ok_or_else(|| format!("{address:#x} is outside of shared memory"))?;
        if !offset.is_multiple_of(self.grain) {
            return Err(format!("{address:#x} in shared memory is not aligned"));
        }
        let cells = offset / self.grain..(offset + size).div_ceil(self.grain);
        Ok((offset, cells))
    }

    fn at(&self, cell: usize) -> String {
        format!("shared memory + {:#x}", self.grain * cell)
    }

    pub(super) fn read(&mut self, address: u64, to: &mut [u8], observer: &Observer) -> Result<()> {
        let (offset, cells) = self.place(address, to.len())?;
        for cell in cells {
            self.read_cell(cell, observer)?;
        }
        to.copy_from_slice(&self.bytes[offset..offset + to.len()]);
        Ok(())
    }

    fn read_cell(&mut self, index: usize, observer: &Observer) -> Result<()> {
        let cell = &self.cells[index];
        let at = || self.at(index);
        if cell.arriving > 0 {
            return Err(format!("{} is read while a copy to it is on its way", at()));
        }
        let thread = match observer.reader {
            Reader::Thread(thread) => thread,
            _ => usize::MAX,
        };
        match cell.writer {
            Writer::Nobody => return Err(format!("{} is read, and nobody wrote it", at())),
            Writer::Barrier => return Err(format!("{} is read, where a barrier is", at())),
            Writer::Thread(written) | Writer::Atomics(written) => {
                let number = written.number;
                let ordered = self.is_ordered(written.turn, Reader::Thread(number), thread);
                if !ordered && !has_heard(observer.heard, written.warp, written.time) {
                    return Err(format!(
                        "{} is read, and no barrier orders that after its write by thread {number}",
                        at()
                    ));
                }
                if observer
                    .fences
                    .is_some_and(|now| now(number) == written.fences)
                {
                    return Err(format!(
                        "{} is read by the asynchronous proxy, and thread {number}, which wrote it, ran no \
                         fence.proxy.async since",
                        at()
                    ));
                }
            }
            Writer::Tma { barrier, phase } => {
                if (observer.seen)(barrier).is_none_or(|seen| seen < phase) {
                    return Err(format!(
                        "{} is read, and its barrier was not waited for (phase {phase})",
                        at()
                    ));
                }
            }
        }
        // An asynchronous read is recorded when it is released.
        if observer.fences.is_none() {
            let now = self.now(thread);
            if self.has_barriers {
                self.record_read(index, thread);
            }
            let cell = &mut self.cells[index];
            let (known, new) = (cell.reader, observer.reader);
            cell.reader = match (known.warp(), new.warp()) {
                _ if cell.read.block != now.block || known == new => new,
                (Some(one), Some(other)) if one == other => Reader::Warp(one),
                _ => Reader::Several,
            };
            cell.read = now;
        }
        Ok(())
    }

    /// Records a read for those that learn of it through barriers in shared memory.
    fn record_read(&mut self, index: usize, thread: usize) {
        let read = Left {
            warp: self.first_warp + thread / WARP,
            turn: self.turn,
            time: self.time,
        };
        let reads = &mut self.cells[index].reads;
        reads.retain(|known| known.turn == read.turn && known.warp != read.warp);
        reads.push(read);
    }

    /// Checks that nothing else uses a cell that is about to be written.
    fn check_write(&self, index: usize, writer: Option<usize>, author: &Author) -> Result<()> {
        let cell = &self.cells[index];
        let at = || self.at(index);
        let ordered = |then, by| self.is_ordered(then, by, writer.unwrap_or(usize::MAX));
        if cell.leaving > 0 {
            return Err(format!("{} is written while wgmma reads it", at()));
        }
        if cell.arriving > 0 {
            return Err(format!(
                "{} is written while a copy to it is on its way",
                at()
            ));
        }
        let heard = |read: &Left| has_heard(author.heard, read.warp, read.time);
        // Of the reads since the last barrier of the block, all are recorded or none.
        let all_heard = || !cell.reads.is_empty() && cell.reads.iter().all(heard);
        if !ordered(cell.read, cell.reader) && !all_heard() {
            return Err(format!(
                "{} is written, and no barrier orders that after {:?} read it",
                at(),
                cell.reader
            ));
        }
        let unknown = |read: &&Left| read.turn == self.turn && !author.knows_of(read);
        if let Some(read) = cell.left.iter().find(unknown) {
            return Err(format!(
                "{} is written, and no barrier orders that after wgmma of warps from {} on read it",
                at(),
                read.warp
            ));
        }
        match cell.writer {
            Writer::Barrier => Err(format!("{} is written, where a barrier is", at())),
            Writer::Thread(written) | Writer::Atomics(written)
                if !ordered(written.turn, Reader::Thread(written.number))
                    && !has_heard(author.heard, written.warp, written.time) =>
            {
                Err(format!(
                    "{} is written by two threads without a barrier between",
                    at()
                ))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn write(
        &mut self,
        address: u64,
        from: &[u8],
        author: &Author,
        fences: u32,
    ) -> Result<()> {
        let (offset, cells) = self.place(address, from.len())?;
        let written = self.written(author.thread, fences);
        // The order does not matter of writes that change nothing.
        let same = self.bytes[offset..offset + from.len()] == *from;
        for cell in cells {
            match self.cells[cell].writer {
                Writer::Thread(other)
                    if same
                        && other.turn.block == self.turn
                        && self.cells[cell].arriving + self.cells[cell].leaving == 0 => {}
                _ => {
                    self.check_write(cell, Some(author.thread), author)?;
                    self.cells[cell].writer = Writer::Thread(written);
                }
            }
        }
        self.bytes[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }

    /// Changes bytes in an atomic instruction, and returns what they were.
    pub(super) fn change(
        &mut self,
        address: u64,
        size: usize,
        author: &Author,
        fences: u32,
        change: impl FnOnce(u64) -> Option<u64>,
    ) -> Result<u64> {
        let (offset, cells) = self.place(address, size)?;
        let written = self.written(author.thread, fences);
        for cell in cells {
            match self.cells[cell].writer {
                Writer::Nobody => {
                    return Err(format!("{} is read, and nobody wrote it", self.at(cell)));
                }
                // In whatever order, but not with what reads the sum.
                Writer::Atomics(_) => {
                    let Cell { read, reader, .. } = self.cells[cell];
                    if !self.is_ordered(read, reader, author.thread) {
                        return Err(format!(
                            "{} is written, and no barrier orders that after {reader:?} read it",
                            self.at(cell)
                        ));
                    }
                }
                _ => self.check_write(cell, Some(author.thread), author)?,
            }
            self.cells[cell].writer = Writer::Atomics(written);
        }
        let mut old = [0; 8];
        old[..size].copy_from_slice(&self.bytes[offset..offset + size]);
        let old = u64::from_le_bytes(old);
        let new = change(old).ok_or("the result is undefined")?;
        self.bytes[offset..offset + size].copy_from_slice(&new.to_le_bytes()[..size]);
        Ok(old)
    }

    /// Marks a copy as in flight, by a thread or by the TMA on behalf of the thread.
    pub(super) fn announce(
        &mut self,
        address: u64,
        size: usize,
        author: &Author,
        by_tma: bool,
    ) -> Result<()> {
        for cell in self.place(address, size)?.1 {
            self.check_write(cell, (!by_tma).then_some(author.thread), author)?;
            self.cells[cell].arriving += 1;
        }
        Ok(())
    }

    /// An announced copy has arrived.
    pub(super) fn land(&mut self, address: u64, from: &[u8], writer: Writer) -> Result<()> {
        let (offset, cells) = self.place(address, from.len())?;
        for cell in &mut self.cells[cells] {
            cell.arriving -= 1;
            cell.writer = writer;
        }
        self.bytes[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }

    /// An asynchronous read of a word begins.
    pub(super) fn hold(&mut self, address: u64) -> Result<()> {
        let cells = self.place(address, 4)?.1;
        for cell in &mut self.cells[cells] {
            cell.leaving += 1;
        }
        Ok(())
    }

    /// An asynchronous read of a word ends. `warp` is the first of its warpgroup.
    pub(super) fn release(&mut self, address: u64, warp: usize) -> Result<()> {
        let (turn, time) = (self.turn, self.time);
        let cells = self.place(address, 4)?.1;
        for cell in &mut self.cells[cells] {
            cell.leaving -= 1;
            cell.left
                .retain(|left| left.turn == turn && left.warp != warp);
            cell.left.push(Left { warp, turn, time });
        }
        Ok(())
    }

    pub(super) fn make_barrier(&mut self, address: u64, author: &Author) -> Result<()> {
        self.has_barriers = true;
        for cell in self.place(address, 8)?.1 {
            self.check_write(cell, Some(author.thread), author)?;
            self.cells[cell].writer = Writer::Barrier;
        }
        Ok(())
    }

    /// The memory of a barrier is unwritten again.
    pub(super) fn end_barrier(&mut self, address: u64) -> Result<()> {
        let cells = self.place(address, 8)?.1;
        for cell in &mut self.cells[cells] {
            cell.writer = Writer::Nobody;
        }
        Ok(())
    }
}
