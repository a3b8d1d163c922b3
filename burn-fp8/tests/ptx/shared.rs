//! Shared memory, word by word, with the last writer and reader of each word.
//!
//! Barriers of the block order threads: what one thread wrote (or read) since the last barrier, no other thread may read (or
//! write). What `wgmma` read may also be written by a thread that knows, through barriers in shared memory, that the read is
//! over.

use std::collections::HashMap;

use super::{Result, thread::SHARED_BASE};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writer {
    Nobody,
    /// A thread, with the numbers of block barriers and of its own fences at that time.
    Thread {
        number: usize,
        turn: u32,
        fences: u32,
    },
    /// The TMA, whose data are there when a barrier in shared memory completes a phase.
    Tma {
        barrier: u64,
        phase: u32,
    },
    /// The word is part of a barrier.
    Barrier,
}

#[derive(Clone, Debug)]
struct Word {
    value: u32,
    writer: Writer,
    /// The last reader, or `Several`, and the number of block barriers at that time.
    reader: (Reader, u32),
    /// The number of copies in flight to this word.
    arriving: u32,
    /// The number of asynchronous reads in flight.
    leaving: u32,
    /// The finished asynchronous reads, the last one of each warpgroup.
    left: Vec<Left>,
}

/// A finished asynchronous read: the first warp of its warpgroup, the number of block barriers, and when it ended.
#[derive(Clone, Copy, Debug)]
struct Left {
    warp: usize,
    turn: u32,
    time: u64,
}

/// For each other warp, the time up to which a thread knows what that warp did, through barriers in shared memory at which the
/// warp arrived.
pub(super) type Heard = HashMap<usize, u64>;

/// The thread that writes, with the number of its warp in the cluster, and what it knows of other warps.
pub(super) struct Author<'a> {
    pub(super) thread: usize,
    pub(super) warp: usize,
    pub(super) heard: &'a Heard,
}

impl Author<'_> {
    /// Whether each warp of the warpgroup is the writer's own or has told it of the read.
    fn knows_of(&self, read: &Left) -> bool {
        (read.warp..read.warp + 4).all(|warp| {
            let heard = self.heard.get(&warp);
            warp == self.warp || heard.is_some_and(|time| *time >= read.time)
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    Thread(usize),
    Several,
}

/// The reader, and what it knows.
pub(super) struct Observer<'a> {
    pub(super) reader: Reader,
    /// The last phase of a barrier in shared memory that the reader has seen completed.
    pub(super) seen: &'a dyn Fn(u64) -> Option<u32>,
    /// For a read by the asynchronous proxy: the number of fences that each thread has run.
    pub(super) fences: Option<&'a dyn Fn(usize) -> u32>,
}

#[derive(Debug)]
pub(super) struct Shared {
    words: Vec<Word>,
    /// The number of block barriers so far.
    pub(super) turn: u32,
    /// The number of times that asynchronous reads have ended.
    pub(super) time: u64,
}

impl Shared {
    pub(super) fn new(bytes: usize) -> Self {
        let word = Word {
            value: 0xCDCD_CDCD,
            writer: Writer::Nobody,
            reader: (Reader::Several, u32::MAX),
            arriving: 0,
            leaving: 0,
            left: Vec::new(),
        };
        Self {
            words: vec![word; bytes.div_ceil(4)],
            turn: 0,
            time: 0,
        }
    }

    /// The index of the word at an address, where `count` words must follow each other.
    pub(super) fn index(&self, address: u64, count: usize) -> Result<usize> {
        if !address.is_multiple_of(4) {
            return Err(format!("{address:#x} in shared memory is not aligned"));
        }
        let index = address
            .checked_sub(SHARED_BASE)
            .map(|offset| (offset / 4) as usize);
        index
            .filter(|index| index + count <= self.words.len())
            .ok_or_else(|| format!("{address:#x} is outside of shared memory"))
    }

    pub(super) fn read(&mut self, index: usize, observer: &Observer) -> Result<u32> {
        let turn = self.turn;
        let word = &mut self.words[index];
        let at = || format!("shared memory + {:#x}", 4 * index);
        if word.arriving > 0 {
            return Err(format!("{} is read while a copy to it is on its way", at()));
        }
        match word.writer {
            Writer::Nobody => return Err(format!("{} is read, and nobody wrote it", at())),
            Writer::Barrier => return Err(format!("{} is read, where a barrier is", at())),
            Writer::Thread {
                number,
                turn: written,
                fences,
            } => {
                if written == turn && observer.reader != Reader::Thread(number) {
                    return Err(format!(
                        "{} is read, and no barrier orders that after its write by thread {number}",
                        at()
                    ));
                }
                if observer.fences.is_some_and(|now| now(number) == fences) {
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
            word.reader = match word.reader {
                (reader, then) if then == turn && reader != observer.reader => {
                    (Reader::Several, turn)
                }
                _ => (observer.reader, turn),
            };
        }
        Ok(word.value)
    }

    /// Checks that nothing else uses a word that is about to be written.
    fn check_write(&self, index: usize, writer: Option<usize>, author: &Author) -> Result<()> {
        let word = &self.words[index];
        let at = || format!("shared memory + {:#x}", 4 * index);
        let own = |reader: Reader| writer.is_some_and(|writer| reader == Reader::Thread(writer));
        if word.leaving > 0 {
            return Err(format!("{} is written while wgmma reads it", at()));
        }
        if word.arriving > 0 {
            return Err(format!(
                "{} is written while a copy to it is on its way",
                at()
            ));
        }
        if word.reader.1 == self.turn && !own(word.reader.0) {
            return Err(format!(
                "{} is written, and no barrier orders that after {:?} read it",
                at(),
                word.reader.0
            ));
        }
        let unknown = |read: &&Left| read.turn == self.turn && !author.knows_of(read);
        if let Some(read) = word.left.iter().find(unknown) {
            return Err(format!(
                "{} is written, and no barrier orders that after wgmma of warps from {} on read it",
                at(),
                read.warp
            ));
        }
        match word.writer {
            Writer::Barrier => Err(format!("{} is written, where a barrier is", at())),
            Writer::Thread { number, turn, .. }
                if turn == self.turn && !own(Reader::Thread(number)) =>
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
        index: usize,
        value: u32,
        author: &Author,
        fences: u32,
    ) -> Result<()> {
        let thread = author.thread;
        self.check_write(index, Some(thread), author)?;
        self.words[index].value = value;
        self.words[index].writer = Writer::Thread {
            number: thread,
            turn: self.turn,
            fences,
        };
        Ok(())
    }

    /// Marks a copy to the word as in flight, by a thread or by the TMA on behalf of the thread.
    pub(super) fn announce(&mut self, index: usize, author: &Author, by_tma: bool) -> Result<()> {
        self.check_write(index, (!by_tma).then_some(author.thread), author)?;
        self.words[index].arriving += 1;
        Ok(())
    }

    /// The copy has arrived.
    pub(super) fn land(&mut self, index: usize, value: u32, writer: Writer) {
        let word = &mut self.words[index];
        word.arriving -= 1;
        (word.value, word.writer) = (value, writer);
    }

    /// An asynchronous read of the word begins.
    pub(super) fn hold(&mut self, index: usize) {
        self.words[index].leaving += 1;
    }

    /// An asynchronous read of the word ends. `warp` is the first of its warpgroup.
    pub(super) fn release(&mut self, index: usize, warp: usize) {
        let (turn, time) = (self.turn, self.time);
        let word = &mut self.words[index];
        word.leaving -= 1;
        word.left
            .retain(|left| left.turn == turn && left.warp != warp);
        word.left.push(Left { warp, turn, time });
    }

    pub(super) fn make_barrier(&mut self, index: usize, author: &Author) -> Result<()> {
        for word in index..index + 2 {
            self.check_write(word, Some(author.thread), author)?;
            self.words[word].writer = Writer::Barrier;
        }
        Ok(())
    }
}
