//! Shared memory, word by word, with who wrote and read each word last.
//!
//! Threads are ordered by barriers of the block: what one wrote (or read) since the last, no other may read (or write). What
//! `wgmma` read may be written too by who has heard of it, by barriers in shared memory.

use std::collections::HashMap;

use super::{Result, thread::SHARED_BASE};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writer {
    Nobody,
    /// A thread, after so many barriers of the block and fences of its own.
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
    /// The last reader, or that there are several, and after how many barriers.
    reader: (Reader, u32),
    /// Copies on their way.
    arriving: u32,
    /// Asynchronous reads on their way.
    leaving: u32,
    /// Those that are over, of each warpgroup the last.
    left: Vec<Left>,
}

/// An asynchronous read by the warpgroup that begins with a warp, after so many barriers of the block, and when it was over.
#[derive(Clone, Copy, Debug)]
struct Left {
    warp: usize,
    turn: u32,
    time: u64,
}

/// Until when a thread has heard of other warps, by barriers in shared memory at which they arrived.
pub(super) type Heard = HashMap<usize, u64>;

/// Who writes.
pub(super) struct Author<'a> {
    pub(super) thread: usize,
    pub(super) heard: &'a Heard,
}

impl Author<'_> {
    /// Whether all warps of the warpgroup have told of a read, or are one's own.
    fn knows_of(&self, read: &Left) -> bool {
        (read.warp..read.warp + 4).all(|warp| {
            let heard = self.heard.get(&warp);
            warp == self.thread / 32 || heard.is_some_and(|time| *time >= read.time)
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    Thread(usize),
    Several,
}

/// What reads, and what it knows.
pub(super) struct Observer<'a> {
    pub(super) reader: Reader,
    /// The phase of a barrier in shared memory that it has seen completed.
    pub(super) seen: &'a dyn Fn(u64) -> Option<u32>,
    /// By the asynchronous proxy: the fences that a thread has run.
    pub(super) fences: Option<&'a dyn Fn(usize) -> u32>,
}

#[derive(Debug)]
pub(super) struct Shared {
    words: Vec<Word>,
    /// Barriers of the block so far.
    pub(super) turn: u32,
    /// Counts the ends of asynchronous reads.
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

    /// The word at an address, of `count` that follow each other.
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
        // An asynchronous read is over when it is released.
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

    /// That nothing else uses a word that is about to be written.
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

    /// A copy to the word is on its way: of a thread, or of the TMA that it asked.
    pub(super) fn announce(&mut self, index: usize, author: &Author, by_tma: bool) -> Result<()> {
        self.check_write(index, (!by_tma).then_some(author.thread), author)?;
        self.words[index].arriving += 1;
        Ok(())
    }

    /// The copy is there.
    pub(super) fn land(&mut self, index: usize, value: u32, writer: Writer) {
        let word = &mut self.words[index];
        word.arriving -= 1;
        (word.value, word.writer) = (value, writer);
    }

    /// An asynchronous read of the word begins, or ends.
    pub(super) fn hold(&mut self, index: usize) {
        self.words[index].leaving += 1;
    }

    /// By the warpgroup that begins with a warp.
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
