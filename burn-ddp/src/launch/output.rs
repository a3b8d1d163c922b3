//! What a rank writes, copied line by line, each after the rank's number.

use std::{
    io::{BufRead, BufReader, Read, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long a pipe may be silent when the ranks have ended. A process that left its group may hold one open
/// for ever.
const SILENCE: Duration = Duration::from_secs(1);
/// As many bytes as a pipe can hold by the time that the ranks have ended. What comes after these is not theirs.
const PIPE: u64 = 1 << 20;

/// One pipe of a rank, and the thread that copies it.
pub(super) struct Output {
    thread: JoinHandle<()>,
    read: Arc<AtomicU64>,
    written: Arc<AtomicU64>,
}

impl Output {
    pub(super) fn copy(
        rank: usize,
        output: impl Read + Send + 'static,
        sink: impl Fn() -> Box<dyn Write> + Send + 'static,
    ) -> Self {
        let (read, written) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let counts = (read.clone(), written.clone());
        let thread = thread::spawn(move || {
            let mut lines = BufReader::new(output);
            let mut line = Vec::new();
            while let Ok(bytes @ 1..) = lines.read_until(b'\n', &mut line) {
                counts.0.fetch_add(bytes as u64, Ordering::SeqCst);
                if line.last() != Some(&b'\n') {
                    line.push(b'\n');
                }
                let mut whole = format!("[{rank}] ").into_bytes();
                whole.append(&mut line);
                // A closed output is the reader's wish.
                let _ = sink().write_all(&whole);
                counts.1.fetch_add(bytes as u64, Ordering::SeqCst);
            }
        });
        Self {
            thread,
            read,
            written,
        }
    }

    /// To be asked for the rest, when the ranks have ended.
    pub(super) fn finish(self) -> Rest {
        let written = self.written.load(Ordering::SeqCst);
        Rest {
            output: self,
            written,
            end: written + PIPE,
            heard: Instant::now(),
        }
    }
}

/// What is left in a pipe.
pub(super) struct Rest {
    output: Output,
    /// Bytes when someone asked last.
    written: u64,
    end: u64,
    heard: Instant,
}

impl Rest {
    /// Whether more of it may come. A reader who takes a line slowly is waited for.
    pub(super) fn is_coming(&mut self) -> bool {
        let written = self.output.written.load(Ordering::SeqCst);
        let has_more = self.output.read.load(Ordering::SeqCst) > written;
        if has_more && written == self.written {
            self.heard = Instant::now();
        }
        self.written = written;
        !self.output.thread.is_finished() && written < self.end && self.heard.elapsed() < SILENCE
    }
}
